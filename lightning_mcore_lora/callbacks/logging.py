"""When monitors log, and how: values that are the same on every rank, once for each optimizer step that is logged."""

from collections.abc import Mapping

import lightning.pytorch as pl


def is_logged(trainer: "pl.Trainer") -> bool:
    """Whether the batch that has ended completed an optimizer step that is logged."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not every or trainer.fit_loop.epoch_loop._should_accumulate():
        return False
    return trainer.global_step % every == 0


def log(pl_module: "pl.LightningModule", values: Mapping[str, float]) -> None:
    """Log values that all ranks have in common."""
    for name, value in values.items():
        pl_module.log(name, value, rank_zero_only=True, batch_size=1)
