"""Plots, by matplotlib."""

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mcore_lora.memory.estimate import GIB, MemoryEstimate

SUFFIXES = (".png", ".html", ".svg", ".pdf")


def check_plot(path: str | Path) -> Path:
    """Check that a plot can be written to a file, before anything runs.

    Raises:
        ValueError: If its name has no known suffix.
        ModuleNotFoundError: If matplotlib is not there.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"plot={str(path)!r} must end with one of {SUFFIXES}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'lightning-mcore-lora[plot]'")
    return path


def plot_peaks(path: Path, steps: Sequence[int], peaks: Sequence[Sequence[float]], name: str, estimate: Any) -> None:
    """Peak of each rank over steps, and the estimate beside it.

    Args:
        path: The file.
        steps: Optimizer steps that were logged.
        peaks: At each, GiB of each rank.
        name: What was measured.
        estimate: A :class:`~lightning_mcore_lora.MemoryEstimate`, or ``None``.
    """
    figure, axes = _axes(8.0, 4.5)
    for rank, values in enumerate(zip(*peaks, strict=True)):
        axes.plot(steps, values, marker=".", linewidth=1, label=f"rank {rank}" if len(peaks[0]) <= 16 else None)
    if estimate is not None:
        axes.axhline(estimate.total_gib, color="black", linestyle="--", label="estimate, most loaded rank")
    axes.set(xlabel="optimizer step", ylabel="GiB", title=name)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_estimate(path: Path, estimate: MemoryEstimate) -> None:
    """Components of an estimate, as bars."""
    names = list(estimate.components)
    figure, axes = _axes(8.0, 1.2 + 0.3 * len(names))
    bars = axes.barh(names, [count / GIB for count in estimate.components.values()])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set(xlabel="GiB", title=f"Memory of the most loaded rank: {estimate.total_gib:.2f} GiB")
    _save(figure, path)


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".html":
        figure.savefig(path)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    path.write_text(f"<!doctype html><meta charset='utf-8'><title>Memory</title>\n{svg[svg.index('<svg') :]}")
