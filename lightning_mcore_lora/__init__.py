"""LoRA-tune large Megatron-Core models from a Lightning Trainer."""

import warnings

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

with warnings.catch_warnings():
    # Megatron-Core warns at import of each optional library that is not installed.
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

from lightning_mcore_lora.adapters import (
    LoRAConfig,
    LoRAReport,
    apply_lora,
    check_gradients,
    lora_plus_groups,
    merge_lora,
    remove_lora,
    unmerge_lora,
)
from lightning_mcore_lora.callbacks import LoRASPCallback, MemoryMonitor, RouterMonitor
from lightning_mcore_lora.checkpoint import load_checkpoint
from lightning_mcore_lora.memory import (
    FabricMemoryMonitor,
    MemoryEstimate,
    Recommendation,
    estimate_memory,
    flops_per_token,
    recommend,
)
from lightning_mcore_lora.models import build_gpt_model, generate, load_hf_weights
from lightning_mcore_lora.peft import load_peft_adapter, save_peft_adapter
from lightning_mcore_lora.strategy import MCoreTP
from lightning_mcore_lora.strategy.routing import RouterStats

MCoreTP.register_strategies(StrategyRegistry)
MCoreTP.register_strategies(STRATEGY_REGISTRY)

__all__ = [
    "FabricMemoryMonitor",
    "LoRAConfig",
    "LoRAReport",
    "LoRASPCallback",
    "MCoreTP",
    "MemoryEstimate",
    "MemoryMonitor",
    "Recommendation",
    "RouterMonitor",
    "RouterStats",
    "apply_lora",
    "build_gpt_model",
    "check_gradients",
    "estimate_memory",
    "flops_per_token",
    "generate",
    "load_checkpoint",
    "load_hf_weights",
    "load_peft_adapter",
    "lora_plus_groups",
    "merge_lora",
    "recommend",
    "remove_lora",
    "save_peft_adapter",
    "unmerge_lora",
]
