"""Fields of Megatron-Core's ``TransformerConfig`` from Hugging Face configs, by what families have in common."""

from typing import Any

import torch
from megatron.core.activations import quick_gelu

Config = dict[str, Any]


def dense_fields(hf: Config) -> Config:
    """What all have in common: norms, grouped-query attention, gated MLP."""
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
        "attention_dropout": hf.get("attention_dropout") or 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def with_biases(hf: Config) -> Config:
    """Llama's biases: Megatron-Core has them on every linear or on none."""
    attention, mlp = bool(hf.get("attention_bias")), bool(hf.get("mlp_bias"))
    if attention != mlp:
        raise NotImplementedError(
            f"attention_bias={attention} with mlp_bias={mlp} is not supported: Megatron-Core has biases on every "
            "linear or on none (add_bias_linear)"
        )
    return {"add_bias_linear": attention}


def with_window(hf: Config, kinds: list[str] | None = None) -> Config:
    """Sliding-window attention of all layers, or of those whose kind is ``"sliding_attention"``."""
    unknown = sorted(set(kinds or ()) - {"sliding_attention", "full_attention"})
    if unknown:
        raise NotImplementedError(f"layer_types has {unknown}, which Megatron-Core's attention cannot express")
    window = hf.get("sliding_window")
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return {}
    # transformers counts the token itself, Megatron-Core those before it.
    fields: Config = {"window_size": (window - 1, 0)}
    if kinds is not None and "full_attention" in kinds:
        fields["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    return fields


def qwen_window(hf: Config) -> Config:
    """Qwen's layers from ``max_window_layers`` on see a window, if ``use_sliding_window`` is on."""
    first = hf.get("max_window_layers", 28)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(hf["num_hidden_layers"])]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    return with_window(hf | {"sliding_window": window}, hf.get("layer_types") or kinds)


def mixture_fields(hf: Config, *, ffn: str, normalized: bool) -> Config:
    """What mixtures of experts have in common.

    Args:
        hf: The config.
        ffn: Name of the setting with an expert's width.
        normalized: Whether the weights of the experts that a token goes to sum to one.
    """
    top_k = hf["num_experts_per_tok"]
    if top_k == 1 and normalized:
        raise NotImplementedError(
            "num_experts_per_tok=1 with norm_topk_prob=True is not supported: Megatron-Core does not normalize the "
            "weight of a single expert; set norm_topk_prob=False if the model was trained so"
        )
    return {
        "num_moe_experts": hf.get("num_experts", hf.get("num_local_experts")),  # transformers 4, and 5
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": hf[ffn],
        # A softmax over all experts, then the largest: normalized again is a softmax over the largest.
        "moe_router_pre_softmax": not normalized,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": hf.get("router_aux_loss_coef", 0.0) if hf.get("output_router_logits") else 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def qwen_mixture_fields(hf: Config) -> Config:
    """Qwen's mixtures, some of whose layers may be dense."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    is_mixture = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
    mixture = mixture_fields(hf, ffn="moe_intermediate_size", normalized=hf.get("norm_topk_prob", False))
    return dense_fields(hf) | mixture | {"moe_layer_freq": 1 if all(is_mixture) else is_mixture}


def qwen2_moe_fields(hf: Config) -> Config:
    """Qwen2-MoE: shared experts with a gate, biases on q, k and v."""
    return qwen_mixture_fields(hf) | {
        "add_qkv_bias": hf.get("qkv_bias", True),
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def gpt_oss_fields(hf: Config) -> Config:
    """GPT-OSS: biases everywhere, sinks in the softmax, a clamped gated unit, every other layer with a window."""
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(hf["num_hidden_layers"])]
    return (
        dense_fields(hf)
        | mixture_fields(hf, ffn="intermediate_size", normalized=True)
        | with_window(hf, hf.get("layer_types") or alternating)
        | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": hf.get("swiglu_limit", 7.0),
        }
    )
