"""What a frozen base keeps for backward: one row of :data:`KEPT` for each thing that a layer keeps.

A frozen linear keeps its weight only, so these are the inputs of norms, attentions and activations. Rows hold for
Megatron-Core's layers, in ``local`` specs as in Transformer Engine's; the adapters' own part is in
:mod:`lightning_mcore_lora.adapters.cost`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.activations import quick_gelu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig

from lightning_mcore_lora.parallel import ParallelSizes


@dataclass(frozen=True)
class Work:
    """A microbatch on one rank.

    Args:
        config: The model's config at the layout.
        sizes: The layout.
        batch: Sequences.
        sequence: Tokens of each.
        element: Bytes of an element of activations.
        weight: Bytes of an element of the base's weights; with mixed precision more than of activations.
        te: Whether the layers are Transformer Engine's.
        flash: Whether the attention keeps no scores.
        on_cpu: Whether torch's kernels are the CPU's: a half-precision RMSNorm works in float32, and a dropout's mask
            is as wide as its input.
        imbalance: Tokens that the busiest rank's experts get over the mean.
    """

    config: TransformerConfig
    sizes: ParallelSizes
    batch: int
    sequence: int
    element: int
    weight: int
    te: bool
    flash: bool
    on_cpu: bool
    imbalance: float = 1.0

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Modules of a layer that are computed again."""
        is_selective = self.config.recompute_granularity == "selective"
        return tuple(self.config.recompute_modules or ()) if is_selective else ()

    @property
    def stream(self) -> int:
        """Bytes of an element of hidden states between layers; those of the embedding are as its weight."""
        return self.weight if _keeps_residuals() else self.element

    @property
    def normed(self) -> int:
        """Bytes of an element that a norm gives: Megatron-Core's own norms give what they get."""
        return self.element if self.te else self.stream

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.batch * self.sequence

    @property
    def split(self) -> float:
        """Tokens on this rank between the tensor-parallel regions."""
        return self.tokens / (self.sizes.tensor if self.sizes.sequence_parallel else 1)

    @property
    def heads(self) -> float:
        """Features of the queries on this rank."""
        return self.config.num_attention_heads * self.config.kv_channels / self.sizes.tensor

    @property
    def keys(self) -> float:
        """Features of the keys on this rank."""
        return self.config.num_query_groups * self.config.kv_channels / self.sizes.tensor

    @property
    def load(self) -> float:
        """Tokens of the busiest rank's experts over the mean, as far as their capacity lets them."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return self.imbalance
        return factor if self.config.moe_pad_expert_input_to_capacity else min(self.imbalance, factor)

    @property
    def routed(self) -> float:
        """Tokens that go through experts on the busiest rank, a token counted for each of its experts."""
        sizes = self.sizes
        return self.tokens * self.config.moe_router_topk * self.load * sizes.expert_tensor / sizes.tensor


@functools.cache
def _keeps_residuals() -> bool:
    """Whether a residual wider than its branch stays so: in Megatron-Core 0.19 it does, in 0.16 the branch decides."""
    branch, residual = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    return get_bias_dropout_add(training=True, fused=False)((branch, None), residual, 0.0).dtype == residual.dtype


def _copies(work: Work) -> bool:
    """Whether a norm keeps a float32 copy of its input, and not the input."""
    return work.on_cpu and work.config.normalization == "RMSNorm" and work.element < 4


def norm_input(work: Work) -> float:
    """Bytes of a norm's input."""
    return work.split * work.config.hidden_size * (4 if _copies(work) else work.stream)


def _statistics(work: Work) -> int:
    return 8 if work.config.normalization == "LayerNorm" else 4


def _norm(work: Work) -> float:
    return norm_input(work) + work.split * _statistics(work)


def _head_norms(work: Work) -> float:
    config = work.config
    if not config.qk_layernorm:
        return 0.0
    heads = (work.heads + work.keys) / config.kv_channels
    if _copies(work):
        kept = (work.heads + work.keys) * 4
    else:
        # Queries and keys are views of one product with the values, which is kept as a whole; queries of several
        # groups are gathered into a copy.
        is_copied = config.num_query_groups > work.sizes.tensor and config.num_attention_heads > config.num_query_groups
        kept = ((2 if is_copied else 1) * work.heads + 2 * work.keys) * work.element
    return work.tokens * (kept + _statistics(work) * heads)


def _rotations(work: Work) -> float:
    return 0.0 if work.config.apply_rope_fusion else 4 * work.sequence * work.config.kv_channels * work.element


def _attention_inputs(work: Work) -> float:
    """Queries, keys and values, the latter two repeated for each head where scores are kept."""
    config = work.config
    if work.flash:
        return work.tokens * (work.heads + 2 * work.keys) * work.element
    values = work.heads
    if config.num_query_groups == config.num_attention_heads:  # not repeated: still a view of the whole product
        whole = config.qk_layernorm and not _copies(work)  # which the norms keep already
        values = 0.0 if whole else work.heads + 2 * work.keys
    return work.tokens * (2 * work.heads + values) * work.element


def _output(work: Work) -> float:
    """A flash kernel's output, and a logarithm of each row's sum."""
    heads = work.config.num_attention_heads / work.sizes.tensor
    return work.tokens * (work.heads * work.element + 4 * heads) if work.flash else 0.0


def _scores(work: Work) -> float:
    if work.flash:
        return 0.0
    config = work.config
    heads = config.num_attention_heads / work.sizes.tensor
    sink = config.softmax_type == "learnable"
    squared = work.batch * heads * work.sequence * (work.sequence + sink)
    each = work.element
    if config.attention_softmax_in_fp32 and (config.bf16 or config.fp16):
        each += 4  # the softmax is in float32, what multiplies V is not
    if config.attention_dropout:
        each += (4 if work.on_cpu else 1) + work.element
    return squared * each + work.sequence**2  # and the mask


def _checkpointed_attention(work: Work) -> float:
    # The values are a view of the product that holds queries and keys too, which norms of heads may keep already.
    is_kept = work.config.qk_layernorm and not _copies(work)
    return work.tokens * (work.heads + work.keys + (0 if is_kept else work.heads + 2 * work.keys)) * work.element


@dataclass(frozen=True)
class Activation:
    """One row of :data:`ACTIVATIONS`: what a gated activation keeps beside gate and up, in its output's width."""

    holds: Callable[[TransformerConfig], Any]
    kept: float


ACTIVATIONS: tuple[Activation, ...] = (
    Activation(lambda c: c.bias_activation_fusion or c.use_te_activation_func, 0),
    # What comes out of the activation, and up plus its offset.
    Activation(lambda c: c.activation_func is torch.nn.functional.silu, 2),
    # The clamped gate too.
    Activation(lambda c: c.activation_func is quick_gelu, 3),
    Activation(lambda c: True, 2),
)


def _activation(config: TransformerConfig, tokens: float, width: float, element: int) -> float:
    if not config.gated_linear_unit:
        return tokens * width * element
    extra = next(row.kept for row in ACTIVATIONS if row.holds(config))
    return tokens * width * (2 + extra) * element


def _dense(work: Work) -> float:
    return _activation(work.config, work.tokens, work.config.ffn_hidden_size / work.sizes.tensor, work.element)


def _experts(work: Work) -> float:
    config = work.config
    width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) / work.sizes.expert_tensor
    # The activation is weighted by the router's probability, which keeps both where that is not fused.
    weighted = 0 if config.bias_activation_fusion else width * work.element
    return _activation(config, work.routed, width, work.element) + work.routed * (weighted + 4)


def _router(work: Work) -> float:
    # Its input, whether it trains or not; indices of the tokens to and from the experts, and probabilities.
    return _norm_output(work) + work.split * work.config.moe_router_topk * 32


def _shared(work: Work) -> float:
    config = work.config
    width = config.moe_shared_expert_intermediate_size
    if not width:
        return 0.0
    gate = work.split * config.hidden_size * work.element if config.moe_shared_expert_gate else 0.0
    # What overlaps its communication adds no offset to up.
    plain = config.moe_shared_expert_overlap and not config.bias_activation_fusion
    less = work.tokens * width / work.sizes.tensor * work.element if plain else 0.0
    return _activation(config, work.tokens, width / work.sizes.tensor, work.element) + gate - less


def _norm_output(work: Work) -> float:
    """What the router reads, and an activation checkpoint of experts or of an MLP keeps."""
    return 0.0 if "layernorm" in work.recomputed else work.split * work.config.hidden_size * work.normed


def _dense_input(work: Work) -> float:
    return 0.0 if work.te else _norm_output(work)  # of a fused norm, which keeps it already


def _dropout(work: Work) -> float:
    mask = work.stream if work.on_cpu else 1
    return work.split * work.config.hidden_size * mask if work.config.hidden_dropout else 0.0


def _cast(work: Work, *features: float) -> float:
    """Transformer Engine keeps what it casts weights to; of a linear each between so many features and the hidden."""
    casts = work.te and work.weight != work.element
    return sum(features) * work.config.hidden_size * work.element if casts else 0.0


def _cast_attention(work: Work) -> float:
    return _cast(work, 2 * work.heads, 2 * work.keys)


def _products(config: TransformerConfig) -> int:
    return 3 if config.gated_linear_unit else 2


def _cast_dense(work: Work) -> float:
    return _cast(work, _products(work.config) * work.config.ffn_hidden_size / work.sizes.tensor)


def _cast_shared(work: Work) -> float:
    width = work.config.moe_shared_expert_intermediate_size or 0
    return _cast(work, _products(work.config) * width / work.sizes.tensor)


def _cast_experts(work: Work) -> float:
    config, sizes = work.config, work.sizes
    width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) / sizes.expert_tensor
    return _cast(work, _products(config) * width * (config.num_moe_experts or 0) / sizes.expert)


def layer_input(work: Work, number: int) -> float:
    """Bytes of the hidden states that a layer gets."""
    return work.split * work.config.hidden_size * (work.stream if number else work.weight)


def activation_input(work: Work, width: int) -> float:
    """Bytes of what ``linear_fc1`` gives.

    Args:
        work: The microbatch.
        width: Features of the activation on this rank.
    """
    return work.tokens * width * (2 if work.config.gated_linear_unit else 1) * work.element


#: Number of the first thing in a layer that is kept for backward once a linear trains, by the linear's name.
STAGES = {"linear_qkv": 1, "linear_proj": 2, "router": 3, "linear_fc1": 3, "linear_fc2": 4}


@dataclass(frozen=True)
class Kept:
    """One thing that a layer keeps.

    Args:
        name: Of the component in the estimate.
        kind: ``"every"`` layer, or ``"dense"`` or ``"mixture"`` ones.
        stage: What must come before it in a layer to train, for it to be kept: see :data:`STAGES`.
        bytes: On one rank.
        freed_by: Entries of ``recompute_modules`` that free it.
        instead: What is kept then: the input of what is computed again.
    """

    name: str
    kind: str
    stage: int
    bytes: Callable[[Work], float]
    freed_by: tuple[str, ...] = ()
    instead: Callable[[Work], float] = lambda work: 0.0


_CAST = "weights cast to half precision"

KEPT: tuple[Kept, ...] = (
    Kept("norms", "every", 0, _norm),
    Kept(_CAST, "every", 1, _cast_attention),
    Kept("attention", "every", 1, _head_norms),
    Kept("attention", "every", 1, _rotations),
    Kept("attention", "every", 1, _attention_inputs, ("core_attn",), _checkpointed_attention),
    Kept("attention", "every", 1, _output, ("core_attn",)),
    Kept("attention scores", "every", 1, _scores, ("core_attn",)),
    Kept("dropout masks", "every", 2, _dropout),
    Kept("norms", "every", 2, _norm),
    Kept(_CAST, "dense", 3, _cast_dense, ("mlp",)),
    Kept("mlp", "dense", 3, _dense, ("mlp",), _dense_input),
    Kept(_CAST, "mixture", 3, _cast_shared, ("moe", "shared_experts")),
    Kept("mlp", "mixture", 3, _shared, ("moe", "shared_experts")),
    Kept(_CAST, "mixture", 3, _cast_experts, ("moe",)),
    Kept("experts", "mixture", 3, _router, ("moe",), _norm_output),
    Kept("experts", "mixture", 3, _experts, ("moe",)),
    Kept("dropout masks", "every", 4, _dropout),
)


class LayerBytes(NamedTuple):
    """Bytes of one layer.

    Args:
        kept: By component.
        again: Of the largest piece that is computed again, while it is.
    """

    kept: dict[str, float]
    again: float


def layer_bytes(work: Work, moe: bool, stage: int = 0) -> LayerBytes:
    """What one layer keeps.

    Args:
        work: The microbatch.
        moe: Whether the layer holds experts.
        stage: Number of the first thing in it that is kept.
    """
    kept: dict[str, float] = {}
    again: dict[str, float] = {}
    for row in KEPT:
        if row.stage >= stage and row.kind in ("every", "mixture" if moe else "dense"):
            module = next((name for name in row.freed_by if name in work.recomputed), None)
            kept[row.name] = kept.get(row.name, 0.0) + (row.instead if module else row.bytes)(work)
            if module:
                again[module] = again.get(module, 0.0) + row.bytes(work)
    return LayerBytes(kept, max(again.values(), default=0.0))


def base_bytes(work: Work, mixtures: list[bool], first: tuple[int, int]) -> LayerBytes:
    """What all layers of a frozen base keep, and the norm after them.

    Args:
        work: The microbatch.
        mixtures: Of each layer whether it holds experts.
        first: The first layer that anything trains in, and the stage in it: what comes before keeps nothing.
    """
    config = work.config
    is_whole = config.recompute_granularity == "full"
    kept = {"norms": _norm(work)}  # the last one
    again = 0.0
    if config.recompute_granularity:
        first = (0, 0)  # hidden states ask for gradients from the embedding on
    number = config.recompute_num_layers or 1
    chunk = number if config.recompute_method == "uniform" else 1
    if is_whole:  # beside hidden states a layer gets the rotation's angles
        kept["recomputed layers' inputs"] = 4 * work.sequence * config.kv_channels
    for i, moe in enumerate(mixtures):
        if i < first[0]:
            continue
        layer = layer_bytes(work, moe, first[1] if i == first[0] else 0)
        again = max(again, layer.again)
        if is_whole and (config.recompute_method == "uniform" or i < number):
            again = max(again, chunk * sum(layer.kept.values()))
            layer = LayerBytes({"recomputed layers' inputs": 0.0 if i % chunk else layer_input(work, i)}, 0.0)
        for name, count in layer.kept.items():
            kept[name] = kept.get(name, 0.0) + count
    return LayerBytes(kept, again)


def loss_bytes(work: Work, vocabulary: int) -> tuple[float, float]:
    """Bytes of the vocabulary-parallel cross entropy: kept for backward, and beside it while it is computed.

    Args:
        work: The microbatch.
        vocabulary: Rows of the output layer on this rank.
    """
    logits = work.tokens * vocabulary
    kept = logits * 4 + work.tokens * 9  # the softmax in float32; which labels are elsewhere, and the labels
    return kept, logits * work.element if work.element < 4 else 0.0  # float32 logits become the softmax in place
