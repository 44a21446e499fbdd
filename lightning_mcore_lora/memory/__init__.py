"""Memory and work of a run, measured and predicted."""

from lightning_mcore_lora.memory.estimate import MemoryEstimate, estimate_memory
from lightning_mcore_lora.memory.fabric import FabricMemoryMonitor
from lightning_mcore_lora.memory.flops import flops_per_token
from lightning_mcore_lora.memory.recommend import Recommendation, recommend

__all__ = [
    "FabricMemoryMonitor",
    "MemoryEstimate",
    "Recommendation",
    "estimate_memory",
    "flops_per_token",
    "recommend",
]
