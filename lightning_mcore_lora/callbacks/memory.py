"""Memory in the Trainer's log."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mcore_lora.callbacks.logging import is_logged, log
from lightning_mcore_lora.memory.readings import MemoryWindow, worst_over_ranks


class MemoryMonitor(pl.Callback):
    """Logs memory, the largest over all ranks and which rank's it is, each time the Trainer logs.

    Keys: see :class:`~lightning_mcore_lora.memory.readings.MemoryWindow`, and ``memory/worst_rank``. A logged step
    costs one small all-reduce; others cost nothing.

    Args:
        prog_bar: Whether the progress bar shows the peak too.
    """

    def __init__(self, *, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._window: MemoryWindow | None = None

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._window = MemoryWindow(trainer.strategy.root_device)

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        if self._window is None or not is_logged(trainer):
            return
        values = worst_over_ranks(self._window.close(), self._window.peak, trainer.strategy.root_device)
        log(pl_module, values, prog_bar=(self._window.peak,) if self.prog_bar else ())
