"""Memory in the Trainer's log."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mcore_lora.callbacks.logging import is_logged
from lightning_mcore_lora.memory.estimate import MemoryEstimate
from lightning_mcore_lora.memory.monitor import Monitor
from lightning_mcore_lora.parallel import ParallelSizes


class MemoryMonitor(pl.Callback):
    """Logs memory, finds settings that do not fit each other, and explains an out-of-memory.

    The largest values over all ranks, and which rank's they are, each time the Trainer logs. Keys: see
    :class:`~lightning_mcore_lora.memory.readings.MemoryWindow`, and ``memory/worst_rank``. A logged step costs one
    small all-reduce; others cost nothing. Conflicts are those of ``docs/conflicts.md``, looked for once the model is
    ready to train: warnings on rank zero, errors on all ranks.

    Args:
        prog_bar: Whether the progress bar shows the peak too.
        csv: CSV file with a row for each logged step; rank zero writes it.
        plot: PNG, HTML, SVG or PDF file with the peak of each rank over steps, drawn at the end; needs matplotlib.
        snapshots: Folder for torch's history of allocations, at the highest peak and out of memory; CUDA only.
        estimate: What is expected; ``None`` estimates what runs, for the largest batch that the model got.

    Raises:
        TypeError: If ``estimate`` is none.
        ValueError: If ``csv`` is a folder, or the plot's suffix is unknown.
        ModuleNotFoundError: If a plot is asked for without matplotlib.
    """

    def __init__(
        self,
        *,
        prog_bar: bool = False,
        csv: str | Path | None = None,
        plot: str | Path | None = None,
        snapshots: str | Path | None = None,
        estimate: MemoryEstimate | None = None,
    ) -> None:
        self.prog_bar = prog_bar
        self._monitor = Monitor(csv, plot, snapshots, estimate)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        parallel = getattr(trainer.strategy, "parallel", None)
        sizes = ParallelSizes(trainer.world_size) if parallel is None else parallel.sizes
        self._monitor.start(pl_module, sizes, trainer.strategy.root_device, str(trainer.precision))

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        if is_logged(trainer):
            values = self._monitor.read(trainer.global_step)
            for logger in trainer.loggers:  # by the module each would take longer than to measure all of them
                logger.log_metrics(values, trainer.fit_loop.epoch_loop._batches_that_stepped)
            if values and self.prog_bar:
                name = self._monitor.peak
                pl_module.log(name, values[name], prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._monitor.explain(exception, trainer.strategy.root_device, trainer.optimizers)
        self._monitor.close(trainer.optimizers)

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._monitor.close(trainer.optimizers)
