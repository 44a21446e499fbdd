"""Adapters from Hugging Face PEFT."""

import logging
from pathlib import Path

import torch
from torch import nn

from lightning_mcore_lora.adapters import LoRAReport, adapters, apply_lora, remove_lora
from lightning_mcore_lora.checkpoint.errors import together
from lightning_mcore_lora.peft.adapter import Adapter
from lightning_mcore_lora.peft.model import config_of
from lightning_mcore_lora.peft.names import Names
from lightning_mcore_lora.peft.place import put, settings_for, why_apart
from lightning_mcore_lora.peft.reading import read

log = logging.getLogger(__name__)


def load_peft_adapter(model: nn.Module, directory: str | Path, *, base: str | Path | None = None) -> LoRAReport | None:
    """Load a PEFT adapter, wherever it was trained, at any layout; training goes on from it.

    A collective over all processes. A model without adapters gets them first, with the adapter's settings; linears that
    are fused here and have different A there get factors of their own (``canonical``), which is logged. What an
    adapter says nothing of in a fused linear, k for example, stays at nothing in training too.

    Args:
        model: The base model with its weights, or a module that holds it.
        directory: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``, of PEFT or of
            :func:`save_peft_adapter`, in either form.
        base: The Hugging Face directory of the base model, where :func:`~lightning_mcore_lora.build_gpt_model` did not
            build the model from it.

    Returns:
        What became of each target, if the model had no adapters before.

    Raises:
        ValueError: If it is of another model, or does not fit the adapters that the model has.
        CheckpointError: On every rank, if it cannot be read or holds what has no place here.
    """
    names = Names(config_of(model, base))
    adapter = Adapter({})
    with together(f"cannot load the PEFT adapter {directory}"):
        adapter = read(Path(directory), names)
    if next(adapters(model), None) is not None:
        put(adapter, model, names)
        return None
    settings = settings_for(model, adapter, names)
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    report = apply_lora(model, settings)
    try:
        put(adapter, model, names)
    except (RuntimeError, ValueError):  # leave the model as it was
        remove_lora(model)
        for parameter in trains:
            parameter.requires_grad_(True)
        raise
    _say_what_is_apart(adapter, names)
    return report


def _say_what_is_apart(adapter: Adapter, names: Names) -> None:
    sites = dict.fromkeys(names.by_parameter[name].site for name in adapter.updates)
    reasons = [reason for site in sites if (reason := why_apart(names.targets[site], adapter))]
    if reasons and torch.distributed.get_rank() == 0:
        log.warning(
            "LoRA: %d fused linears cannot hold the adapter with one A (%s, for one): their parts get factors of their "
            "own (canonical)",
            len(reasons),
            reasons[0],
        )
