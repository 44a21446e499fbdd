"""The strategy."""

from lightning_mcore_lora.strategy.trainer import MCoreTP

__all__ = ["MCoreTP"]
