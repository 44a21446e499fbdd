"""Hugging Face PEFT: adapters in and out, and merged into base weights."""

from lightning_mcore_lora.peft.loading import load_peft_adapter
from lightning_mcore_lora.peft.saving import save_peft_adapter

__all__ = ["load_peft_adapter", "save_peft_adapter"]
