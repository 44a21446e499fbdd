"""Callbacks for the Trainer."""

from lightning_mcore_lora.callbacks.lora import LoRASPCallback
from lightning_mcore_lora.callbacks.memory import MemoryMonitor
from lightning_mcore_lora.callbacks.routers import RouterMonitor

__all__ = ["LoRASPCallback", "MemoryMonitor", "RouterMonitor"]
