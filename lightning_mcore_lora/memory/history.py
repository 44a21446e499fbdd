"""What was logged, kept in a file, and drawn at the end."""

import csv
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mcore_lora.memory.plots import check_plot, plot_peaks

log = logging.getLogger(__name__)


class History:
    """Writes one row of a CSV file at each logged step, and a plot at the end; on rank zero.

    Columns are ``step``, the keys that are logged, and ``rank0`` to the last rank: each one's peak in GiB. The file of
    an earlier part of the run is continued; after a change of layout in another file, with a number.

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
        self._file: Path | None = None
        self._steps: list[int] = []
        self._peaks: list[Sequence[float]] = []

    def begin(self, columns: Sequence[str]) -> None:
        """Look for the file to write: one of an earlier run with other columns is left alone, for a numbered one."""
        self._steps, self._peaks = [], []
        if self._csv is None:
            return
        for number in itertools.count():
            path = self._csv.with_stem(f"{self._csv.stem}-{number}") if number else self._csv
            if self._columns(path) in ([], list(columns)):
                break
        if number:
            log.warning("csv=%r has other columns, of another layout or program: %s is written", str(self._csv), path)
        self._file = path

    @staticmethod
    def _columns(path: Path) -> list[str]:
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return next(csv.reader(file), [])

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
        if self._file is None:
            return
        row = {"step": step, **values, **{f"rank{rank}": peak for rank, peak in enumerate(peaks)}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", newline="") as file:  # whole at every step, whatever happens then
            writer = csv.DictWriter(file, list(row))
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)

    def draw(self, name: str, estimate: Callable[[], Any]) -> None:
        """Draw the plot, if there is anything to draw.

        Args:
            name: What was measured.
            estimate: Gives the estimate.
        """
        if self._plot is not None and self._steps:
            plot_peaks(self._plot, self._steps, self._peaks, name, estimate())
