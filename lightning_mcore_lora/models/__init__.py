"""Models: Megatron-Core GPT from Hugging Face directories."""

from lightning_mcore_lora.models.generation import generate
from lightning_mcore_lora.models.gpt import build_gpt_model
from lightning_mcore_lora.models.loading import load_hf_weights

__all__ = ["build_gpt_model", "generate", "load_hf_weights"]
