"""Model families: how a Hugging Face config and its tensors map to Megatron-Core. One family is one row."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_mcore_lora.models.layouts import Layout, columns, gate_up, qkv, replicated, rows


@dataclass(frozen=True)
class HFConfig:
    """What a Hugging Face ``config.json`` says, in Megatron-Core's words."""

    family: "Family"
    transformer: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    tied: bool
    rotary_base: float


@dataclass(frozen=True)
class Weight:
    """One Megatron-Core parameter and the tensors it is made of.

    ``{i}`` stands for the layer number. Of experts ``{e}`` is the number among all, ``{local}`` among this rank's; they
    are cut over the expert-tensor-parallel group.

    Args:
        mcore: Names of the parameter; which one exists depends on the layer spec (Transformer Engine fuses norms).
        hf: Names of the tensors, in the order that ``layout`` expects.
        layout: How this rank's part is cut from the tensors.
    """

    mcore: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout

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
        ignored: Endings of tensor names that carry no weight.
    """

    fields: Callable[[dict[str, Any]], dict[str, Any]]
    supported: dict[str, tuple[Any, ...]]
    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = field(default=())


def _llama_fields(hf: dict[str, Any]) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """What mixtures of experts of Qwen have in common."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    is_mixture = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
    top_k, normalized = hf["num_experts_per_tok"], hf.get("norm_topk_prob", False)
    if top_k == 1 and normalized:
        raise NotImplementedError(
            "num_experts_per_tok=1 with norm_topk_prob=True is not supported: Megatron-Core does not normalize the "
            "weight of a single expert; set norm_topk_prob=False if the model was trained so"
        )
    return _llama_fields(hf) | {
        "num_moe_experts": hf.get("num_experts", hf.get("num_local_experts")),  # transformers 4, and 5
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": 1 if all(is_mixture) else is_mixture,
        # A softmax over all experts, then the largest: normalized again is a softmax over the largest.
        "moe_router_pre_softmax": not normalized,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": hf.get("router_aux_loss_coef", 0.0) if hf.get("output_router_logits") else 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def _qwen2_moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    return _moe_fields(hf) | {
        "add_qkv_bias": hf.get("qkv_bias", True),
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


_LAYER = "decoder.layers.{i}."
_HF_LAYER = "model.layers.{i}."

_ATTENTION_AND_ENDS = (
    Weight(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), rows),
    Weight(
        (_LAYER + "input_layernorm.weight", _LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        (_HF_LAYER + "input_layernorm.weight",),
        replicated,
    ),
    Weight(
        (_LAYER + "self_attention.linear_qkv.weight",),
        tuple(_HF_LAYER + f"self_attn.{name}_proj.weight" for name in "qkv"),
        qkv,
    ),
    Weight((_LAYER + "self_attention.linear_proj.weight",), (_HF_LAYER + "self_attn.o_proj.weight",), columns),
    Weight(
        (_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        (_HF_LAYER + "post_attention_layernorm.weight",),
        replicated,
    ),
    Weight(("decoder.final_layernorm.weight",), ("model.norm.weight",), replicated),
    Weight(("output_layer.weight",), ("lm_head.weight",), rows),
)
_QK_NORMS = tuple(
    Weight(
        (_LAYER + f"self_attention.{name}_layernorm.weight",),
        (_HF_LAYER + f"self_attn.{name}_norm.weight",),
        replicated,
    )
    for name in "qk"
)
_QKV_BIAS = Weight(
    (_LAYER + "self_attention.linear_qkv.bias",),
    tuple(_HF_LAYER + f"self_attn.{name}_proj.bias" for name in "qkv"),
    qkv,
)


def _mlp(mcore: tuple[str, ...], hf: str) -> tuple[Weight, Weight]:
    """The two linears of an MLP: each place where ``linear_fc1`` and ``linear_fc2`` may be, and where gate is."""
    gate, up, down = (_HF_LAYER + hf.format(name) for name in ("gate", "up", "down"))
    fc1, fc2 = (tuple(_LAYER + place.format(name) for place in mcore) for name in ("linear_fc1", "linear_fc2"))
    return Weight(fc1, (gate, up), gate_up), Weight(fc2, (down,), columns)


_DENSE = _mlp(("mlp.{}.weight",), "mlp.{}_proj.weight")
_EXPERTS = (
    Weight((_LAYER + "mlp.router.weight",), (_HF_LAYER + "mlp.gate.weight",), replicated),
    *_mlp(
        ("mlp.experts.local_experts.{{local}}.{}.weight", "mlp.experts.{}.weight{{local}}"),
        "mlp.experts.{{e}}.{}_proj.weight",
    ),
)
_SHARED_EXPERTS = (
    *_mlp(("mlp.shared_experts.{}.weight",), "mlp.shared_expert.{}_proj.weight"),
    Weight((_LAYER + "mlp.shared_experts.gate_weight",), (_HF_LAYER + "mlp.shared_expert_gate.weight",), replicated),
)

_QWEN_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_type": ("default", None),
    "quant_method": (None,),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        fields=_llama_fields,
        supported={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "rope_type": ("default", None),
            "quant_method": (None,),
        },
        weights=(*_ATTENTION_AND_ENDS, *_DENSE),
        ignored=("rotary_emb.inv_freq",),
    ),
    "qwen3_moe": Family(
        fields=lambda hf: _moe_fields(hf) | {"qk_layernorm": True},
        supported=_QWEN_SUPPORTED,
        weights=(*_ATTENTION_AND_ENDS, *_QK_NORMS, *_DENSE, *_EXPERTS),
    ),
    "qwen2_moe": Family(
        fields=_qwen2_moe_fields,
        supported=_QWEN_SUPPORTED,
        weights=(*_ATTENTION_AND_ENDS, _QKV_BIAS, *_DENSE, *_EXPERTS, *_SHARED_EXPERTS),
    ),
}


def read_hf_config(directory: str | Path) -> HFConfig:
    """Read the ``config.json`` of a Hugging Face model directory.

    Args:
        directory: The folder that holds it.

    Returns:
        The settings in Megatron-Core's words.

    Raises:
        FileNotFoundError: If there is no ``config.json``.
        NotImplementedError: If the family or one of its settings is not supported, naming it.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: a Hugging Face model directory has a config.json")
    hf = json.loads(path.read_text())
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise NotImplementedError(f"model_type={kind!r} in {path} is not supported; supported: {sorted(FAMILIES)}")
    family = FAMILIES[kind]
    # transformers 5 keeps rope settings in rope_parameters, transformers 4 in rope_scaling and rope_theta.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    found = {"rope_type": rope.get("rope_type", rope.get("type"))}
    found["quant_method"] = (hf.get("quantization_config") or {}).get("quant_method")
    for setting, allowed in family.supported.items():
        value = found.get(setting, hf.get(setting))
        if value not in allowed:
            raise NotImplementedError(
                f"{setting}={value!r} in {path} is not supported for model_type={kind!r}; supported: {allowed[0]!r}"
            )
    return HFConfig(
        family=family,
        transformer=family.fields(hf),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        tied=hf.get("tie_word_embeddings", False),
        rotary_base=float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))),
    )
