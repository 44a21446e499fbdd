"""Checkpoints: small, safe, and readable at any layout."""

from lightning_mcore_lora.checkpoint.alone import load_checkpoint
from lightning_mcore_lora.checkpoint.errors import CheckpointError
from lightning_mcore_lora.checkpoint.manifest import Manifest

__all__ = ["CheckpointError", "Manifest", "load_checkpoint"]
