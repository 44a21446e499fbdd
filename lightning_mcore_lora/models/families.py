"""Model families: how Hugging Face configs and tensors map to Megatron-Core. One family is one row of FAMILIES."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore_lora.models import layouts
from lightning_mcore_lora.models.fields import (
    dense_fields,
    gpt_oss_fields,
    mixture_fields,
    qwen2_moe_fields,
    qwen_mixture_fields,
    qwen_window,
    with_biases,
    with_window,
)
from lightning_mcore_lora.models.layouts import Layout


@dataclass(frozen=True)
class Weight:
    """One Megatron-Core parameter and the tensors it is made of.

    ``{i}`` stands for the layer number. Of experts ``{e}`` is the number among all, ``{local}`` among this rank's; they
    are cut over the expert-tensor-parallel group.

    Args:
        mcore: Names of the parameter; which one exists depends on the layer spec (Transformer Engine fuses norms).
        hf: Names of the tensors on disk, in the order that ``layout`` expects.
        layout: How this rank's part is cut from the tensors.
        parameter: Name of transformers' parameter that holds the weight, where that is not a ``Linear`` under the name
            on disk. PEFT reaches such a one only by ``target_parameters``.
    """

    mcore: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    parameter: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of transformers' parameters that it is made of."""
        return self.hf if self.parameter is None else (self.parameter,)

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert's."""
        return ".experts." in self.mcore[0]


@dataclass(frozen=True)
class Family:
    """One row of :data:`FAMILIES`.

    Args:
        fields: Makes fields of ``TransformerConfig`` from the config. One that it cannot express it refuses by name.
        supported: Setting to allowed values; anything else is refused by name. A setting left out is one of them.
        weights: The mapping of parameters.
        defaults: What transformers takes for settings that a config leaves out.
        ignored: Endings of tensor names that carry no weight.
        renamed: Last names of linears that PEFT, in this family, takes for parts of the experts when they are
            ``target_modules``; so it must be told of them by ``target_parameters``.
    """

    fields: Callable[[dict[str, Any]], dict[str, Any]]
    supported: dict[str, tuple[Any, ...]]
    weights: tuple[Weight, ...]
    defaults: dict[str, Any]
    ignored: tuple[str, ...] = field(default=())
    renamed: tuple[str, ...] = field(default=())


_LAYER = "decoder.layers.{i}."
_HF_LAYER = "model.layers.{i}."
_QKV = tuple(_HF_LAYER + f"self_attn.{name}_proj" for name in "qkv")


def _named(modules: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules)


_ATTENTION_AND_ENDS = (
    Weight(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), layouts.vocabulary),
    Weight(
        (_LAYER + "input_layernorm.weight", _LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        (_HF_LAYER + "input_layernorm.weight",),
        layouts.replicated,
    ),
    Weight((_LAYER + "self_attention.linear_qkv.weight",), _named(_QKV, "weight"), layouts.qkv),
    Weight((_LAYER + "self_attention.linear_proj.weight",), (_HF_LAYER + "self_attn.o_proj.weight",), layouts.columns),
    Weight(
        (_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        (_HF_LAYER + "post_attention_layernorm.weight",),
        layouts.replicated,
    ),
    Weight(("decoder.final_layernorm.weight",), ("model.norm.weight",), layouts.replicated),
    Weight(("output_layer.weight",), ("lm_head.weight",), layouts.vocabulary),
)
_QK_NORMS = tuple(
    Weight(
        (_LAYER + f"self_attention.{name}_layernorm.weight",),
        (_HF_LAYER + f"self_attn.{name}_norm.weight",),
        layouts.replicated,
    )
    for name in "qk"
)
_QKV_BIAS = (Weight((_LAYER + "self_attention.linear_qkv.bias",), _named(_QKV, "bias"), layouts.qkv),)
_PROJ_BIAS = (
    Weight((_LAYER + "self_attention.linear_proj.bias",), (_HF_LAYER + "self_attn.o_proj.bias",), layouts.replicated),
)
_SINKS = (
    Weight((_LAYER + "self_attention.core_attention.softmax_offset",), (_HF_LAYER + "self_attn.sinks",), layouts.rows),
)


def _mlp(
    mcore: tuple[str, ...],
    gate_up: tuple[str, ...],
    down: str,
    parameters: tuple[str | None, str | None] = (None, None),
) -> tuple[Weight, Weight]:
    """The two linears of an MLP: each place where ``linear_fc1`` and ``linear_fc2`` may be, and where gate is."""
    fc1, fc2 = (tuple(_LAYER + place.format(name) for place in mcore) for name in ("linear_fc1", "linear_fc2"))
    up_layout, down_layout = layouts.gate_up, layouts.columns
    if len(gate_up) == 1:
        up_layout, down_layout = layouts.packed_gate_up, layouts.packed_down
    elif mcore[0].endswith("bias"):
        down_layout = layouts.replicated
    hf = tuple(_HF_LAYER + name for name in gate_up)
    return Weight(fc1, hf, up_layout, parameters[0]), Weight(fc2, (_HF_LAYER + down,), down_layout, parameters[1])


_EXPERTS_WEIGHT = ("mlp.experts.local_experts.{{local}}.{}.weight", "mlp.experts.{}.weight{{local}}")
_EXPERTS_BIAS = ("mlp.experts.local_experts.{{local}}.{}.bias", "mlp.experts.{}.bias{{local}}")
_PACKED = (_HF_LAYER + "mlp.experts.gate_up_proj", _HF_LAYER + "mlp.experts.down_proj")


def _router(disk: str, kind: str = "weight", parameter: str | None = None) -> Weight:
    return Weight((_LAYER + f"mlp.router.{kind}",), (_HF_LAYER + disk,), layouts.replicated, parameter)


_DENSE = _mlp(("mlp.{}.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.down_proj.weight")
_DENSE_BIAS = _mlp(("mlp.{}.bias",), ("mlp.gate_proj.bias", "mlp.up_proj.bias"), "mlp.down_proj.bias")
_QWEN_EXPERTS = (
    _router("mlp.gate.weight", parameter=_HF_LAYER + "mlp.gate.weight"),
    *_mlp(
        _EXPERTS_WEIGHT,
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        "mlp.experts.{e}.down_proj.weight",
        _PACKED,
    ),
)
_SHARED_EXPERTS = (
    *_mlp(
        ("mlp.shared_experts.{}.weight",),
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "mlp.shared_expert.down_proj.weight",
    ),
    Weight(
        (_LAYER + "mlp.shared_experts.gate_weight",),
        (_HF_LAYER + "mlp.shared_expert_gate.weight",),
        layouts.replicated,
    ),
)
_MIXTRAL_EXPERTS = (
    _router("block_sparse_moe.gate.weight", parameter=_HF_LAYER + "mlp.gate.weight"),
    *_mlp(
        _EXPERTS_WEIGHT,
        ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        "block_sparse_moe.experts.{e}.w2.weight",
        _PACKED,
    ),
)
_GPT_OSS_EXPERTS = (
    _router("mlp.router.weight", parameter=_HF_LAYER + "mlp.router.weight"),
    _router("mlp.router.bias", "bias"),
    *_mlp(_EXPERTS_WEIGHT, ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", _PACKED),
    *_mlp(_EXPERTS_BIAS, ("mlp.experts.gate_up_proj_bias",), "mlp.experts.down_proj_bias"),
)

_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_PLAIN: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False, None)}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False, None)}
_RENAMED = ("gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        fields=lambda hf: dense_fields(hf) | with_biases(hf),
        supported=_PLAIN,
        weights=(*_ATTENTION_AND_ENDS, *_QKV_BIAS, *_PROJ_BIAS, *_DENSE, *_DENSE_BIAS),
        defaults=_COMMON,
        ignored=("rotary_emb.inv_freq",),
    ),
    "mistral": Family(
        fields=lambda hf: dense_fields(hf) | with_window(hf),
        supported=_PLAIN,
        weights=(*_ATTENTION_AND_ENDS, *_DENSE),
        defaults=_COMMON | {"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": Family(
        fields=lambda hf: dense_fields(hf) | qwen_window(hf) | {"add_qkv_bias": True},
        supported=_PLAIN,
        weights=(*_ATTENTION_AND_ENDS, *_QKV_BIAS, *_DENSE),
        defaults=_COMMON | {"sliding_window": 4096, "num_key_value_heads": 32},
    ),
    "qwen3": Family(
        fields=lambda hf: dense_fields(hf) | qwen_window(hf) | {"qk_layernorm": True},
        supported=_PLAIN | _NO_BIAS,
        weights=(*_ATTENTION_AND_ENDS, *_QK_NORMS, *_DENSE),
        defaults=_COMMON | {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        fields=lambda hf: qwen_mixture_fields(hf) | {"qk_layernorm": True},
        supported=_PLAIN | _NO_BIAS | _NO_WINDOW,
        weights=(*_ATTENTION_AND_ENDS, *_QK_NORMS, *_DENSE, *_QWEN_EXPERTS),
        defaults=_COMMON | {"num_key_value_heads": 4},
        renamed=_RENAMED,
    ),
    "qwen2_moe": Family(
        fields=qwen2_moe_fields,
        supported=_PLAIN | _NO_BIAS | _NO_WINDOW,
        weights=(*_ATTENTION_AND_ENDS, *_QKV_BIAS, *_DENSE, *_QWEN_EXPERTS, *_SHARED_EXPERTS),
        defaults=_COMMON | {"num_key_value_heads": 16},
        renamed=_RENAMED,
    ),
    "mixtral": Family(
        fields=lambda hf: (
            dense_fields(hf) | mixture_fields(hf, ffn="intermediate_size", normalized=True) | with_window(hf)
        ),
        supported=_PLAIN | {"router_jitter_noise": (0.0, None)},
        weights=(*_ATTENTION_AND_ENDS, *_MIXTRAL_EXPERTS),
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6},
    ),
    "gpt_oss": Family(
        fields=gpt_oss_fields,
        supported={"swiglu_alpha": (1.702, None), "attention_bias": (True, None)},
        weights=(*_ATTENTION_AND_ENDS, *_QKV_BIAS, *_PROJ_BIAS, *_SINKS, *_GPT_OSS_EXPERTS),
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": _YARN,
        },
    ),
}
