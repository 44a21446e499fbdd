"""Adapters to Hugging Face PEFT."""

from pathlib import Path

import torch
from torch import nn

from lightning_mcore_lora.checkpoint.errors import together
from lightning_mcore_lora.peft.collect import adapter_of
from lightning_mcore_lora.peft.model import config_of
from lightning_mcore_lora.peft.names import Names
from lightning_mcore_lora.peft.writing import write


def save_peft_adapter(
    model: nn.Module, directory: str | Path, *, base: str | Path | None = None, for_vllm: bool = False
) -> None:
    """Save a model's adapters as ``peft.PeftModel.from_pretrained`` reads them.

    A collective over all processes; rank zero writes. Fused linears become those of the Hugging Face model: q, k and v
    with the same A and their rows of B, gate and up likewise. Experts become ``target_parameters``.

    Args:
        model: A model with adapters, or a module that holds it.
        directory: Folder for ``adapter_config.json`` and ``adapter_model.safetensors``; those there are replaced.
        base: The Hugging Face directory of the base model, where :func:`~lightning_mcore_lora.build_gpt_model` did not
            build the model from it.
        for_vllm: Write it as vLLM reads it: each expert under its own name, one rank and one alpha.

    Raises:
        ValueError: If the format cannot hold what was trained, with the way out.
        CheckpointError: On every rank, if it cannot be written.
    """
    hf = config_of(model, base)
    names = Names(hf)
    writes = torch.distributed.get_rank() == 0
    adapter = adapter_of(model, names, keep=writes)
    known = (getattr(m, "base_path", None) for m in model.modules())
    base_name = str(base) if base is not None else next((path for path in known if isinstance(path, str)), None)
    with together(f"cannot save a PEFT adapter to {directory}"):
        if writes:
            write(adapter, names, Path(directory), base_name, for_vllm)
