"""Routers in the log."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mcore_lora.callbacks.logging import is_logged, log
from lightning_mcore_lora.strategy.routing import RouterStats


class RouterMonitor(pl.Callback):
    """Logs how evenly routers spread tokens over experts, and their auxiliary losses, each time the Trainer logs.

    See :meth:`~lightning_mcore_lora.strategy.routing.RouterStats.collect` for the values. A model without experts logs
    nothing.
    """

    _stats: RouterStats | None = None

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._stats = RouterStats(pl_module)

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        if self._stats is not None and is_logged(trainer):
            log(pl_module, self._stats.collect())

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._close()

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._stats is not None:
            self._stats.close()
            self._stats = None
