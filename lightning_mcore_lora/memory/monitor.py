"""What the Trainer's and Fabric's memory monitors do, free of either."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mcore_lora.memory.conflicts import find_conflicts
from lightning_mcore_lora.memory.estimate import GIB, MemoryEstimate
from lightning_mcore_lora.memory.history import History
from lightning_mcore_lora.memory.observed import Observed
from lightning_mcore_lora.memory.oom import explain, failure_of, is_out_of_memory
from lightning_mcore_lora.memory.readings import MemoryWindow, worst_over_ranks
from lightning_mcore_lora.memory.situation import observe
from lightning_mcore_lora.memory.snapshots import Snapshots
from lightning_mcore_lora.parallel import ParallelSizes

log = logging.getLogger(__name__)


class ConflictError(RuntimeError):
    """Settings do not fit each other, so that the run would fail."""


class Monitor:
    """Watches the memory of one process.

    Args:
        csv: CSV file with a row for each logged step; rank zero writes it.
        plot: PNG, HTML, SVG or PDF file with the peak of each rank over steps, drawn at the end; by rank zero.
        snapshots: Folder for torch's history of allocations, at the highest peak and out of memory; CUDA only.
        estimate: What is expected; ``None`` estimates what runs when it is asked for.

    Raises:
        TypeError: If ``estimate`` is none.
        ValueError: If ``csv`` is a folder, or the plot's suffix is unknown.
        ModuleNotFoundError: If the plot needs what is not installed.
    """

    def __init__(
        self,
        csv: str | Path | None = None,
        plot: str | Path | None = None,
        snapshots: str | Path | None = None,
        estimate: MemoryEstimate | None = None,
    ) -> None:
        if not isinstance(estimate, MemoryEstimate | None):
            raise TypeError(f"estimate={estimate!r} must be what estimate_memory returns, or None")
        self._history = History(csv, plot)
        self._folder = snapshots
        self._given = estimate
        self._told: set[str] = set()
        self._observed: Observed | None = None
        self._snapshots: Snapshots | None = None
        self._window: MemoryWindow | None = None
        self._device = torch.device("cpu")
        self._writes = True
        self._peaks: Sequence[float] = ()
        self._step = 0

    @property
    def peak(self) -> str:
        """The key by which ranks are compared."""
        assert self._window is not None
        return self._window.peak

    def start(self, module: nn.Module | None, sizes: ParallelSizes, device: torch.device, precision: str) -> None:
        """Look for conflicts, and begin to watch. All ranks do, once the model is ready to train.

        Args:
            module: Holds the model; without it there is less to look for, and no estimate of what runs.
            sizes: The layout.
            device: Of this process.
            precision: Lightning's setting.

        Raises:
            ConflictError: On all ranks, if settings of any do not fit each other.
        """
        self.close()
        self._peaks, self._step = (), 0
        self._device, self._window = device, MemoryWindow(device)
        if self._folder is not None:
            self._snapshots = Snapshots(self._folder, _rank(), device)
        if module is not None:
            self._observed = Observed(module, sizes, precision, device.type)
        given = self._given
        tokens = None if given is None else given.micro_batch_size * given.sequence_length
        found = find_conflicts(observe(module, sizes, device, precision, tokens))
        self._tell([(c.row.severity, str(c)) for c in found if c.row.severity != "advice"])
        self._history.begin()
        self._writes = True

    def _tell(self, found: list[tuple[str, str]]) -> None:
        ranks: list[Any] = [found]
        if torch.distributed.is_initialized():
            ranks = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(ranks, found)
        said: dict[tuple[str, str], list[int]] = {}
        for rank, of_rank in enumerate(ranks):
            for severity, text in of_rank:
                said.setdefault((severity, text), []).append(rank)
        errors = []
        for (severity, text), where in said.items():
            whole = text if len(where) == len(ranks) else f"{text} (on rank {', '.join(map(str, where))})"
            if severity == "error":
                errors.append(whole)
            elif _rank() == 0 and text not in self._told:
                log.warning("%s", whole)
            self._told.add(text)
        if errors:
            raise ConflictError("\n".join(errors))

    def read(self, step: int) -> dict[str, float]:
        """Close the window of a logged step. All ranks do; one all-reduce.

        Args:
            step: Optimizer steps that are done.

        Returns:
            The largest values over all ranks, the same on each.
        """
        if self._window is None:
            return {}
        mine = self._window.close()
        values, self._peaks = worst_over_ranks(mine, self._window.peak, self._device)
        self._step = step
        if _rank() == 0:
            self._write(lambda: self._history.add(step, values, self._peaks))
        if self._snapshots is not None:
            snapshots, peak = self._snapshots, mine[self._window.peak]
            self._write(lambda: snapshots.at(peak))
        return values

    def _write(self, action: Callable[[], None]) -> None:
        """Write a file; one that cannot be written ends the writing, not the run: other ranks wait for this one."""
        if self._writes:
            try:
                action()
            except Exception as error:
                self._writes = False
                said = type(error).__name__, error
                log.warning(
                    "MemoryMonitor writes neither csv nor snapshots any more on rank %d: %s: %s", _rank(), *said
                )

    def explain(self, error: BaseException, device: torch.device, optimizers: Sequence[Any] = ()) -> None:
        """If an exception says that memory did not suffice, add a note to it that explains it.

        Args:
            error: The exception; the note shows below it.
            device: Of this process, which may have failed before :meth:`start`.
            optimizers: Those that train.
        """
        if not is_out_of_memory(error) or any("explained by MemoryMonitor" in n for n in _notes(error)):
            return
        try:
            failure = failure_of(error, device, _rank(), [peak * GIB for peak in self._peaks], self._step)
            error.add_note(explain(failure, *self._estimate(optimizers)))
        except Exception as other:  # a device may answer nothing more: the first error is what counts
            error.add_note(f"MemoryMonitor could not explain this: {type(other).__name__}: {other}")
        try:
            if self._snapshots is not None:
                self._snapshots.out_of_memory()
        except Exception as other:
            error.add_note(f"MemoryMonitor could not write the snapshot: {type(other).__name__}: {other}")

    def _estimate(self, optimizers: Sequence[Any] = ()) -> tuple[MemoryEstimate | None, str]:
        if self._given is not None:
            return self._given, ""
        if self._observed is None:
            return None, "the monitor was given neither a model nor an estimate"
        for optimizer in optimizers[:1]:
            self._observed.set_optimizer(getattr(optimizer, "_optimizer", optimizer))
        try:
            return self._observed.estimate(), ""
        except Exception as error:  # beside another failure, or a plot: not to be told instead of it
            return None, f"{error}"

    def close(self, optimizers: Sequence[Any] = ()) -> None:
        """Draw the plot, and stop to watch; may be called again.

        Args:
            optimizers: Those that trained.
        """
        if self._window is not None and _rank() == 0:
            try:
                self._history.draw(self._window.peak, lambda: self._estimate(optimizers)[0])
            except Exception as error:  # a run may be ending by another
                log.warning("The plot was not drawn: %s: %s", type(error).__name__, error)
        self._window = None
        if self._observed is not None:
            self._observed.close()
            self._observed = None
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
