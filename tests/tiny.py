"""A tiny Llama on disk, its adapter factors and its data: what workers and oracle share, and no code of the package."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, SEQUENCE = 2, 48, 12, 6, 8, 96, 96, 12
RANK, ALPHA = 12, 18.0
#: Adam divides by |gradient| + eps at its first step: with the usual 1e-8 a gradient of 1e-7, all rounding, would move
#: a weight as far as any other, and no float32 run could be compared.
ADAM_EPS = 1e-4
STEPS, SAMPLES_PER_STEP = 5, 4
SITES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
D_IN = {"linear_qkv": HIDDEN, "linear_proj": HEADS * HEAD_DIM, "linear_fc1": HIDDEN, "linear_fc2": FFN}
#: Output rows of each Hugging Face linear that a fused one holds.
OUTPUTS = {
    "linear_qkv": {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM},
    "linear_proj": {"o_proj": HIDDEN},
    "linear_fc1": {"gate_proj": FFN, "up_proj": FFN},
    "linear_fc2": {"down_proj": HIDDEN},
}


@dataclass
class Factors:
    """Factors of one site: one A, and B of each Hugging Face linear."""

    a: Tensor
    b: dict[str, Tensor]


def factors(layer: int, site: str, dtype: torch.dtype = torch.float32) -> Factors:
    """Random nonzero factors, always the same."""
    generator = torch.Generator().manual_seed(1000 * layer + SITES.index(site))
    a = torch.randn(RANK, D_IN[site], generator=generator) * D_IN[site] ** -0.5
    b = {name: torch.randn(rows, RANK, generator=generator) * 0.1 for name, rows in OUTPUTS[site].items()}
    return Factors(a.to(dtype), {name: value.to(dtype) for name, value in b.items()})


def fuse_rows(site: str, parts: dict[str, Tensor]) -> Tensor:
    """Rows of the fused linear, written out one query group after the other."""
    if site == "linear_qkv":
        queries = HEADS // KV_HEADS * HEAD_DIM
        blocks = []
        for group in range(KV_HEADS):
            blocks.append(parts["q_proj"][group * queries : (group + 1) * queries])
            blocks.append(parts["k_proj"][group * HEAD_DIM : (group + 1) * HEAD_DIM])
            blocks.append(parts["v_proj"][group * HEAD_DIM : (group + 1) * HEAD_DIM])
        return torch.cat(blocks)
    return torch.cat(list(parts.values()))


def tokens() -> Tensor:
    """Samples of ``SEQUENCE + 1`` tokens, in the order in which a run reads them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (STEPS * SAMPLES_PER_STEP, SEQUENCE + 1), generator=generator)


def config(tied: bool = False) -> "object":
    """The transformers config."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )


def write(directory: Path, max_shard_size: str = "5GB", tied: bool = False) -> Path:
    """Save the model with random weights and norms that are not one."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(11)
    model = LlamaForCausalLM(config(tied))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
