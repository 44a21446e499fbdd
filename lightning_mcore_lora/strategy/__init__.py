"""The strategy."""

from lightning_mcore_lora.strategy.mcore_tp import MCoreTP

__all__ = ["MCoreTP"]
