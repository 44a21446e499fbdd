"""Model FLOPs of LoRA tuning."""

import math
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.cost import trained_parameters
from lightning_mcore_lora.adapters.matching import layer_of
from lightning_mcore_lora.adapters.planning import plan_lora
from lightning_mcore_lora.adapters.sites import Site, find_sites
from lightning_mcore_lora.memory.estimate import first_trained
from lightning_mcore_lora.memory.skeleton import build_skeleton
from lightning_mcore_lora.models.described import Source, describe, transformer_config, with_overrides
from lightning_mcore_lora.parallel import ParallelSizes


def flops_per_token(
    source: Source,
    sequence_length: int,
    lora: LoRAConfig | None = None,
    *,
    vocab_size: int | None = None,
    **overrides: Any,
) -> float:
    """Model FLOPs of one token's forward and backward, over all ranks; what is computed again does not count.

    A linear of N parameters takes 2 N in forward and 2 N for its input's gradient; only one that trains takes another
    2 N for its weight's. So the frozen part counts 4 N, 2/3 of full training's 6 N; in layers before the first that
    trains, which only run forward, 2 N. An attention takes ``12 * heads * head_dim * length / 2``, a third of it in
    forward: a causal token sees half the sequence on average, or its window.

    Args:
        source: See :func:`~lightning_mcore_lora.estimate_memory`.
        sequence_length: Tokens of a sequence.
        lora: The adapters; ``None`` is ``LoRAConfig()``.
        vocab_size: Tokens; required with a ``TransformerConfig``.
        **overrides: Fields of ``TransformerConfig``.

    Raises:
        ValueError: If a setting has no such value.
    """
    if not isinstance(sequence_length, int) or sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length!r} must be a positive integer")
    lora = LoRAConfig() if lora is None else lora
    described = describe(source, vocab_size=vocab_size, max_sequence_length=sequence_length)
    config = transformer_config(with_overrides(described.fields, overrides), ParallelSizes(1), False)
    model = build_skeleton(config, ParallelSizes(1), "local", described.vocab_size, tied=False)
    planned = plan_lora(model, lora)
    first, _ = first_trained(planned, config.num_layers)
    in_full = {id(module) for _, saved in planned.saved for module in saved.modules()}
    forward = frozen = trained = 0.0
    for site in find_sites(model):
        count = sum(weight.numel() for weight in site.weights()) * _share(site)
        if any(id(linear) in in_full for linear in site.linears):
            trained += count
        elif layer_of(site.name) in range(first):
            forward += count
        else:
            frozen += count
    for site, plan in planned.sites:
        if isinstance(plan, str):
            continue
        for name in ("a", "b"):
            # A factor that experts share multiplies a token for each of the token's experts.
            times = _share(site) * (1 if name in plan.each else max(site.experts, 1))
            count = math.prod(plan.shape(name, site)) * times
            if name in trained_parameters(lora):
                trained += count
            else:
                frozen += count
    return 2 * forward + 4 * frozen + 6 * trained + _attention(config, sequence_length, first)


def _share(site: Site) -> float:
    """Share of a site's experts that a token goes to."""
    return site.config.moe_router_topk / site.experts if site.experts else 1.0


def _attention(config: Any, length: int, first: int) -> float:
    width = config.num_attention_heads * config.kv_channels
    total = 0.0
    for layer in range(config.num_layers):
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer + 1)
        seen = min(length, config.window_size[0] + 1) if is_windowed else length
        each = (12 if layer >= first else 4) * width
        total += each * (seen - seen**2 / (2 * length))  # the first `seen` tokens see half of it on average
    return total
