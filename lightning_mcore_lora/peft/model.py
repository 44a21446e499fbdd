"""The Megatron-Core model behind an adapter: which Hugging Face model it is, and its parameters by name."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_mcore_lora.adapters.sites import module_names
from lightning_mcore_lora.models.hf_config import HFConfig, read_hf_config


def config_of(model: nn.Module, base: Any = None) -> HFConfig:
    """The Hugging Face config of a model.

    Args:
        model: The model, or a module that holds it.
        base: A Hugging Face directory, for a model that :func:`~lightning_mcore_lora.build_gpt_model` did not build
            from one.

    Raises:
        ValueError: If neither says which it is.
    """
    if base is not None:
        return read_hf_config(base)
    known = (getattr(m, "hf_config", None) for m in model.modules())
    settings = next((settings for settings in known if isinstance(settings, Mapping)), None)
    if settings is None:
        raise ValueError(
            f"{type(model).__name__} was not built from a Hugging Face directory by build_gpt_model: give base=DIR, "
            "the directory (its config.json is enough) of the model that it is"
        )
    return read_hf_config(settings)


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters outside adapters, by names that begin in the Megatron-Core model and number layers over all stages."""
    modules = module_names(model)
    return {
        f"{modules[path]}.{name}" if modules[path] else name: parameter
        for path, module in model.named_modules()
        if path in modules and ".lora" not in f".{path}"
        for name, parameter in module.named_parameters(recurse=False)
    }
