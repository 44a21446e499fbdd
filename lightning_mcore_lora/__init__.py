"""LoRA-tune large Megatron-Core models from a Lightning Trainer."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mcore_lora.adapters import LoRAConfig, LoRAReport, apply_lora, remove_lora
from lightning_mcore_lora.callbacks import LoRASPCallback, MemoryMonitor
from lightning_mcore_lora.models import build_gpt_model, generate, load_hf_weights
from lightning_mcore_lora.strategy import MCoreTP

MCoreTP.register_strategies(StrategyRegistry)

__all__ = [
    "LoRAConfig",
    "LoRAReport",
    "LoRASPCallback",
    "MCoreTP",
    "MemoryMonitor",
    "apply_lora",
    "build_gpt_model",
    "generate",
    "load_hf_weights",
    "remove_lora",
]
