"""What was logged, kept in a file, and drawn at the end."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mcore_lora.memory.plots import check_plot, plot_peaks


class History:
    """Writes one row of a CSV file at each logged step, and a plot at the end; on rank zero.

    Columns are ``step``, the keys that are logged, and ``rank0`` to the last rank: each one's peak in GiB. A file of an
    earlier part of the run is continued.

    Args:
        csv_path: The CSV file, or ``None``.
        plot: The plot, or ``None``; its suffix says the format.

    Raises:
        ValueError: If the plot's suffix is unknown.
        ModuleNotFoundError: If the plot needs what is not installed.
    """

    def __init__(self, csv_path: str | Path | None, plot: str | Path | None) -> None:
        self._csv = None if csv_path is None else Path(csv_path)
        self._plot = None if plot is None else check_plot(plot)
        self._steps: list[int] = []
        self._peaks: list[Sequence[float]] = []

    def problem(self, columns: Sequence[str]) -> str | None:
        """Why the CSV file cannot be written with these columns, or ``None``."""
        if self._csv is None or not self._csv.exists():
            return None
        with self._csv.open(newline="") as file:
            there = next(csv.reader(file), [])
        if there in ([], list(columns)):
            return None
        return f"csv={str(self._csv)!r} is there with other columns, of another layout or program: give another name"

    def add(self, step: int, values: Mapping[str, float], peaks: Sequence[float]) -> None:
        """Keep what was logged.

        Args:
            step: Optimizer steps that are done.
            values: By key.
            peaks: GiB of each rank.
        """
        if self._plot is not None:
            self._steps.append(step)
            self._peaks.append(peaks)
        if self._csv is None:
            return
        row = {"step": step, **values, **{f"rank{rank}": peak for rank, peak in enumerate(peaks)}}
        self._csv.parent.mkdir(parents=True, exist_ok=True)
        with self._csv.open("a", newline="") as file:  # whole at every step, whatever happens then
            writer = csv.DictWriter(file, list(row))
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)

    def draw(self, name: str, estimate: Any) -> None:
        """Draw the plot, if there is anything to draw."""
        if self._plot is not None and self._steps:
            plot_peaks(self._plot, self._steps, self._peaks, name, estimate)
