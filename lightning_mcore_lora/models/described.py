"""What a model is to be: read from a Hugging Face directory, or from Megatron-Core's own config."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.transformer import TransformerConfig

from lightning_mcore_lora.models.hf_config import read_hf_config
from lightning_mcore_lora.models.rope import Rope
from lightning_mcore_lora.parallel import ParallelSizes

Source: TypeAlias = "str | Path | Mapping[str, Any] | TransformerConfig"


#: Fields of ``TransformerConfig`` that follow the layout, with the settings that say it.
LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "expert_model_parallel_size": "expert_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
}
_COUNTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "recompute_num_layers",
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A model before it is built.

    Args:
        fields: Fields of ``TransformerConfig``.
        vocab_size: Tokens.
        max_sequence_length: Longest sequence.
        tied: Whether the output layer is the embedding.
        rope: The rotary embedding.
        settings: The content of ``config.json``, if it comes from one.
    """

    fields: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    tied: bool
    rope: Rope
    settings: dict[str, Any] | None = None


def describe(
    source: Source,
    *,
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
    tied: bool = False,
    rotary_base: float = 10000.0,
) -> Described:
    """Read what a model is to be; see :func:`~lightning_mcore_lora.build_gpt_model` for the arguments.

    Raises:
        ValueError: If a ``TransformerConfig`` comes without what it does not hold.
    """
    if not isinstance(source, TransformerConfig):
        hf = read_hf_config(source)
        longest = max_sequence_length or hf.max_sequence_length
        return Described(hf.transformer, hf.vocab_size, longest, hf.tied, hf.rope, hf.settings)
    if vocab_size is None or max_sequence_length is None:
        raise ValueError("vocab_size and max_sequence_length are required when source is a TransformerConfig")
    fields = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.init}
    return Described(fields, vocab_size, max_sequence_length, tied, Rope(rotary_base))


def with_overrides(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` with those that a user sets.

    Raises:
        ValueError: If one of those follows the layout.
    """
    for name in overrides:
        if name in LAYOUT:
            raise ValueError(f"{name} follows the layout: leave it out, and set {LAYOUT[name]}")
    return {**fields, **overrides}


def transformer_config(fields: Mapping[str, Any], sizes: ParallelSizes, use_te: bool) -> TransformerConfig:
    """Megatron-Core's config at a layout.

    Args:
        fields: Its fields without the layout's.
        sizes: The layout.
        use_te: Whether the layers are Transformer Engine's.

    Raises:
        ParallelSizeError: If the model cannot be split so.
        ValueError: If Megatron-Core has no such field, or does not take its value.
    """
    for name in _COUNTS:
        value = fields.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r} must be a positive integer")
    # On the undivided config: with sizes in it Megatron-Core raises first, and names no way out.
    whole = _config(fields, ParallelSizes(1), use_te)
    sizes.check_model(whole)
    chunk = whole.recompute_num_layers
    if whole.recompute_method == "uniform" and chunk and whole.num_layers % chunk:
        raise ValueError(f"recompute_num_layers={chunk} must divide num_layers={whole.num_layers} with 'uniform'")
    return _config(fields, sizes, use_te)


def _config(fields: Mapping[str, Any], sizes: ParallelSizes, use_te: bool) -> TransformerConfig:
    fields = {"params_dtype": torch.get_default_dtype()} | dict(fields)  # of bf16-true, for one
    fields |= {
        "tensor_model_parallel_size": sizes.tensor,
        "sequence_parallel": sizes.sequence_parallel,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
    }
    if not torch.cuda.is_available():
        fields |= {"use_cpu_initialization": True, "masked_softmax_fusion": False}
    if not use_te:
        # These fusions, and weight gradients written into main_grad, need CUDA kernels of Apex or Transformer Engine.
        fields |= {
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "moe_grouped_gemm": False,
            "persist_layer_norm": False,
        }
    check_fields(fields, TransformerConfig)
    try:
        return TransformerConfig(**fields)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"Megatron-Core does not take these settings: {error}") from error


def check_fields(names: Iterable[str], config: type) -> None:
    """Check that a config class has fields of these names.

    Raises:
        ValueError: If not, with names that are near.
    """
    known = [field.name for field in dataclasses.fields(config)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            raise ValueError(f"{name!r} is no field of {config.__name__}; near names: {near}")
