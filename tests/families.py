"""A tiny random model of each family on disk, and what transformers and PEFT make of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Not divisible by 2: rows are padded.
VOCAB, SEQUENCE, BATCH, STEPS = 97, 24, 4, 5
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
_QWEN_EXPERTS = _EXPERTS | {"moe_intermediate_size": 24, "num_experts": 4, "mlp_only_layers": [1]}

#: Name to the class of the config, and its settings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON | _HEAD),
    "llama3 tied": ("LlamaConfig", _COMMON | _HEAD | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama biases": (
        "LlamaConfig",
        _COMMON | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LINEAR},
    ),
    "mistral": ("MistralConfig", _COMMON | _HEAD | {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", _COMMON | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", _COMMON | _HEAD | {"rope_parameters": _YARN}),
    "qwen3_moe": ("Qwen3MoeConfig", _COMMON | _HEAD | _QWEN_EXPERTS | {"norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", _COMMON | _QWEN_EXPERTS | {"shared_expert_intermediate_size": 40}),
    "mixtral": ("MixtralConfig", _COMMON | _HEAD | _EXPERTS | {"num_local_experts": 4}),
    "gpt_oss": (
        "GptOssConfig",
        _COMMON
        | _HEAD
        | _EXPERTS
        | {"num_local_experts": 4, "sliding_window": 5, "rope_parameters": _YARN | {"truncate": False}},
    ),
}
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss")


def layouts(name: str) -> list[tuple[int, int, int]]:
    """(TP, EP, ETP) on two processes, and on four; biases of experts need ETP = 1."""
    if name not in MIXTURES:
        return [(2, 1, 2)]
    return [(2, 2, 1)] if name == "gpt_oss" else [(2, 2, 1), (2, 1, 2), (2, 2, 2)]


def world(layout: tuple[int, int, int]) -> int:
    """Processes that a layout takes."""
    tp, ep, etp = layout
    return max(tp, ep * etp)


def write(name: str, directory: Path, **changes: Any) -> Path:
    """Save the model with random weights, norms that are not one, and biases and sinks that are not zero."""
    import transformers

    kind, settings = MODELS[name]
    torch.manual_seed(17)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings | changes))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in parameter_name or "sinks" in parameter_name:
                parameter.normal_(0, 0.5)
            elif "gate.weight" in parameter_name or "router.weight" in parameter_name:
                parameter.normal_(0, 1.0)
            else:
                parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


def reference(directory: Path) -> Any:
    """transformers' model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def tokens(step: int = 0) -> Tensor:
    """Tokens of one batch, ``[batch, sequence + 1]``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, by transformers."""
    logits = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train(model: Any, loss: Callable[[Any, Tensor], Tensor], steps: int, first: int = 0) -> None:
    """A few steps of Adam on what trains."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, tokens(step)).backward()
        optimizer.step()
