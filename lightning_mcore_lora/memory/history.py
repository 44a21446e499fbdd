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
    an earlier part of the run is continued; another run's, or another layout's, is left alone for one with a number.

    Args:
        csv_path: The CSV file, or ``None``.
        plot: The plot, or ``None``; its suffix says the format.

    Raises:
        ValueError: If the CSV file is a folder, or the plot's suffix is unknown.
        ModuleNotFoundError: If the plot needs what is not installed.
    """

    def __init__(self, csv_path: str | Path | None, plot: str | Path | None) -> None:
        if csv_path is not None and Path(csv_path).is_dir():
            raise ValueError(f"csv={str(csv_path)!r} is a folder: name a file")
        self._csv = None if csv_path is None else Path(csv_path)
        self._plot = None if plot is None else check_plot(plot)
        self._file: Path | None = None
        self._steps: list[int] = []
        self._peaks: list[Sequence[float]] = []
        self._is_empty = True

    def begin(self) -> None:
        """Begin a part of a run."""
        self._file, self._steps, self._peaks, self._is_empty = None, [], [], True

    def add(self, step: int, values: Mapping[str, float], peaks: Sequence[float]) -> None:
        """Keep what was logged.

        Args:
            step: Optimizer steps that are done.
            values: By key.
            peaks: GiB of each rank.
        """
        self._is_empty = False
        if self._plot is not None:
            self._steps.append(step)
            self._peaks.append(peaks)
        if self._csv is None:
            return
        row = {"step": step, **values, **{f"rank{rank}": peak for rank, peak in enumerate(peaks)}}
        if self._file is None:
            self._file = self._file_of(row, self._csv)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", newline="") as file:  # whole at every step, whatever happens then
            writer = csv.DictWriter(file, list(row))
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)

    @staticmethod
    def _file_of(row: Mapping[str, Any], given: Path) -> Path:
        """The file that a first row goes into: new, or with the same columns and earlier steps."""
        for number in itertools.count():
            path = given.with_stem(f"{given.stem}-{number}") if number else given
            if not path.exists():
                break
            with path.open(errors="replace") as file:  # of any content
                columns, first = (file.readline().rstrip("\n").split(",") for _ in range(2))
            if columns in ([""], list(row)) and (first == [""] or int(first[0]) < row["step"]):
                break
        if number:
            log.warning("csv=%r is of another run, layout or program: %s is written", str(given), path)
        return path

    def draw(self, name: str, estimate: Callable[[], Any]) -> None:
        """Draw the plot, if there is anything to draw; say so if nothing was logged at all.

        Args:
            name: What was measured.
            estimate: Gives the estimate.
        """
        if self._is_empty and (self._csv or self._plot):
            log.warning("No step was logged, so that neither csv nor plot is written: log more often")
        if self._plot is not None and self._steps:
            plot_peaks(self._plot, self._steps, self._peaks, name, estimate())
