"""Adapters from a checkpoint into a model, without a trainer."""

from pathlib import Path

import torch
from torch import nn

from lightning_mcore_lora.adapters import LoRAConfig, adapters, apply_lora
from lightning_mcore_lora.checkpoint.content import load, open_checkpoint
from lightning_mcore_lora.checkpoint.errors import CheckpointError
from lightning_mcore_lora.checkpoint.manifest import Manifest
from lightning_mcore_lora.checkpoint.tensors import tensors_of
from lightning_mcore_lora.parallel import ParallelContext


def load_checkpoint(model: nn.Module, path: str | Path, strict: bool = True) -> Manifest:
    """Load what a checkpoint has of a model: adapters, other trained weights, and the base if it was saved.

    A collective over all processes; the layout may be another than the checkpoint's. Nothing in the checkpoint is
    executed: it may come from anyone. A model without adapters gets them first, with the settings that are in the
    checkpoint, but ``sequence_mode="auto"``, which fits any layout::

        model = build_gpt_model(directory, parallel)
        load_hf_weights(model, directory, parallel)
        load_checkpoint(model, "runs/finetune/last.ckpt")

    Args:
        model: The base model or a module that holds it, wherever it was when it was saved. Megatron-Core's groups
            exist: with a strategy, or made by ``ParallelContext.create(ParallelSizes(...))``, under
            ``cpu_backend.active()`` where there is no CUDA.
        path: The checkpoint directory.
        strict: Whether base, adapters' settings and names must be those of the checkpoint; otherwise what fits is read.

    Returns:
        What the checkpoint says about itself.

    Raises:
        RuntimeError: If the groups do not exist.
        CheckpointError: On every rank, if it is incomplete, damaged, tampered with, or of another model.
    """
    parallel = ParallelContext.current()
    manifest = open_checkpoint(Path(path).absolute(), parallel)
    if manifest.lora is not None and not next(adapters(model), None):
        try:
            config = LoRAConfig(**(manifest.lora | {"sequence_mode": "auto"}))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"cannot load {path}: its LoRAConfig is not this version's: {error}") from error
        apply_lora(model, config)
    tensors = tensors_of(model)
    loaded = load(path, tensors, [], parallel, strict, manifest)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in loaded.weights.items():
            tensors.all[name].copy_(value)
            if name in parameters:  # beside its master, where a strategy has made one
                parameters[name].copy_(value)
    return manifest
