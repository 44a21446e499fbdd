"""Torch's history of CUDA allocations, in files for https://pytorch.org/memory_viz."""

import itertools
from pathlib import Path

import torch

#: Allocations and frees that are remembered.
ENTRIES = 100_000
#: A peak is new if it is so many times the last one that was kept.
HIGHER = 1.01


class Snapshots:
    """Records allocations, and writes them where memory was largest and where it did not suffice.

    What is written is the last 100,000 allocations and frees, at the end of the window. Recording costs a stack trace
    for each. On the CPU it does nothing: torch keeps no such history there.

    Args:
        folder: Gets ``peak-rankN.pickle``, of the window with the highest peak, and ``oom-rankN.pickle``; files of an
            earlier run are left alone, for names with a number.
        rank: Of this process.
        device: Of this process.
    """

    def __init__(self, folder: str | Path, rank: int, device: torch.device) -> None:
        self._folder, self._rank, self._on = Path(folder), rank, device.type == "cuda"
        self._highest = 0.0
        self._number = next(
            number for number in itertools.count() if not any(self._path(w, number).exists() for w in ("peak", "oom"))
        )
        if self._on:
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES, device=device)

    def at(self, peak: float) -> None:
        """Write the history if the window that has ended had the highest peak until now."""
        if self._on and peak > HIGHER * self._highest:
            self._highest = peak
            self._write("peak")

    def out_of_memory(self) -> None:
        """Write the history of a failure."""
        if self._on:
            self._write("oom")

    def close(self) -> None:
        """Stop recording."""
        if self._on:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._on = False

    def _path(self, what: str, number: int) -> Path:
        return self._folder / f"{what}-rank{self._rank}{f'-{number}' if number else ''}.pickle"

    def _write(self, what: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._path(what, self._number)))
