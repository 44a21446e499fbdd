"""Rotary embeddings: what a Hugging Face config asks for, in Megatron-Core's words. One type is one row of ROPES."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    Args:
        base: Base of the frequencies.
        embedding: ``position_embedding_type`` of Megatron-Core's model.
        settings: Attributes of ``TransformerConfig`` that its embedding reads.
        rescale: Makes the model's frequencies ``[head_dim / 2]`` of the plain ones, given the embedding.
    """

    base: float
    embedding: str = "rope"
    settings: dict[str, Any] = field(default_factory=dict)
    rescale: Callable[[Any, Tensor], Tensor] | None = None


def _plain(rope: dict[str, Any], base: float, longest: int) -> Rope:
    return Rope(base)


def _linear(rope: dict[str, Any], base: float, longest: int) -> Rope:
    return Rope(base, rescale=lambda embedding, frequencies: frequencies / rope["factor"])


def _llama3(rope: dict[str, Any], base: float, longest: int) -> Rope:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    settings = {name: rope[name] for name in names}
    return Rope(base, rescale=lambda embedding, frequencies: embedding._apply_scaling(frequencies, **settings))


def _yarn(rope: dict[str, Any], base: float, longest: int) -> Rope:
    original = rope.get("original_max_position_embeddings") or longest
    factor = rope["factor"] or longest / original
    attention = rope.get("attention_factor")
    if attention is not None and not math.isclose(attention, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0):
        raise NotImplementedError(
            f"attention_factor={attention} with rope_type='yarn' is not supported: Megatron-Core takes 0.1 ln(factor) "
            "+ 1, or what mscale and mscale_all_dim say"
        )
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    both = scales if all(scales) and attention is None else (None, None)
    return Rope(
        base,
        "yarn",
        {
            "yarn_rotary_scaling_factor": factor,
            "yarn_original_max_position_embeddings": original,
            "yarn_beta_fast": rope.get("beta_fast") or 32.0,
            "yarn_beta_slow": rope.get("beta_slow") or 1.0,
            "yarn_mscale": both[0],
            "yarn_mscale_all_dim": both[1],
            "yarn_correction_range_round_to_int": rope.get("truncate", True),
        },
    )


#: One row for each ``rope_type``: ``(settings, base, longest sequence)`` to the embedding.
ROPES: dict[str, Callable[[dict[str, Any], float, int], Rope]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def read_rope(hf: dict[str, Any]) -> Rope:
    """The rotary embedding of a Hugging Face config.

    Raises:
        NotImplementedError: If Megatron-Core cannot express it, naming the setting.
        ValueError: If a setting of its type is missing.
    """
    # transformers 5 keeps them in rope_parameters, transformers 4 in rope_scaling and rope_theta; 5 prefers these.
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if kind not in ROPES:
        raise NotImplementedError(f"rope_type={kind!r} is not supported; supported: {sorted(ROPES)}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise NotImplementedError(f"partial_rotary_factor={partial!r} is not supported; supported: 1.0")
    if hf.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    base = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    try:
        return ROPES[kind](rope, base, hf["max_position_embeddings"])
    except KeyError as missing:
        raise ValueError(f"rope_type={kind!r} needs the setting {missing}, which the config lacks") from missing
