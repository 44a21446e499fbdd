"""LoRA adapters for Megatron-Core's parallel linears."""

from lightning_mcore_lora.adapters.apply import adapters, apply_lora, check_gradients, raise_unreached, remove_lora
from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.groups import lora_plus_groups
from lightning_mcore_lora.adapters.merging import merge_lora, merged_weights, unmerge_lora
from lightning_mcore_lora.adapters.report import LoRAReport, SiteReport

__all__ = [
    "LoRAConfig",
    "LoRAReport",
    "SiteReport",
    "adapters",
    "apply_lora",
    "check_gradients",
    "lora_plus_groups",
    "merge_lora",
    "merged_weights",
    "raise_unreached",
    "remove_lora",
    "unmerge_lora",
]
