"""Memory: measured, predicted, explained."""

from lightning_mcore_lora.memory.estimate import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
