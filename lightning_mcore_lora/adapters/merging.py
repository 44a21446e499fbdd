r"""Base weights with their adapters in them: :math:`W + s B A`, with DoRA its rows scaled to the magnitudes.

Products are taken of whole linears, as a Hugging Face model has them, and cut afterwards: so every layout, and the
merge of directories, gives the same bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_mcore_lora.adapters.apply import adapters
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.placement import Factor
from lightning_mcore_lora.adapters.whole import heads_of, layout_of, whole_factors
from lightning_mcore_lora.models.layouts import Shard


def delta_weight(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What an adapter adds to a weight, ``[d_out, d_in]``, in float32 or better."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(a.device.type, enabled=False):
            return (b.to(dtype) @ a.to(dtype)) * scale
    finally:
        torch.set_float32_matmul_precision(before)


def merged_weight(
    weight: Tensor,
    delta: Tensor,
    magnitude: Tensor | None = None,
    sum_squares: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> Tensor:
    """A weight with an adapter in it, computed in float32 or better and rounded once.

    Args:
        weight: ``[d_out, d_in]``.
        delta: What the adapter adds.
        magnitude: ``[d_out]`` with DoRA.
        sum_squares: Sums squares of the rows' norms over ranks that hold other columns.

    Returns:
        The sum, in the weight's dtype.
    """
    merged = weight.to(delta.dtype) + delta
    if magnitude is not None:
        norms = sum_squares(merged.double().square().sum(1)).sqrt().to(merged.dtype)
        # A row of zeros stays one, whatever it is divided by.
        merged *= (magnitude.to(merged.dtype) / norms.masked_fill(norms == 0, 1.0)).unsqueeze(1)
    return merged.to(weight.dtype)


@torch.no_grad()
def merged_weights(adapter: LoRAAdapter) -> list[Tensor]:
    """This rank's weights of a site with the adapter in them, ``[d_out, d_in]`` each; one, or each expert's.

    A collective over the site's group.
    """
    site, plan = adapter.site, adapter.plan
    whole = whole_factors(adapter, of_all_experts=False)
    layout, heads = layout_of(site), heads_of(site)
    shard = Shard(site.group.rank(), site.group.size(), heads.groups)

    def sum_squares(squares: Tensor) -> Tensor:
        if plan.placement.a is Factor.INPUT and site.group.size() > 1:
            torch.distributed.all_reduce(squares, group=site.group)
        return squares

    merged = []
    for i, weight in enumerate(site.weights()):
        a, b = (value[i] if site.experts else value for value in (whole.a, whole.b))
        parts = layout.split(b, heads) if layout.split else [b]
        each_a = a.chunk(len(parts)) if len(plan.parts) > 1 else [a] * len(parts)
        deltas = [delta_weight(*pair, plan.scale) for pair in zip(each_a, parts, strict=True)]
        magnitude = adapter.magnitude
        mine = magnitude[i] if magnitude is not None and site.experts else magnitude
        merged.append(merged_weight(weight, layout.cut(deltas, shard), mine, sum_squares))
    return merged


def merge_lora(model: nn.Module) -> None:
    """Put every adapter into its base weight, in place; the adapters then rest, and the model computes the same.

    Computed in float32 and rounded once to the weight's dtype, to the same bits at every layout. The weights as they
    were are kept in host memory for :func:`unmerge_lora`; ``remove_lora(model)`` afterwards drops them, and leaves a
    plain model with the adapters in it. A collective over all processes; merging twice changes nothing.

    Args:
        model: A model after :func:`~lightning_mcore_lora.apply_lora`.

    Raises:
        ValueError: If the model has no adapters, or a linear has no weight of its own.
    """
    found = list(adapters(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no LoRA adapters to merge")
    tied = [adapter.site.name for _, adapter in found if not adapter.site.has_weights]
    if tied:
        raise ValueError(f"{tied} cannot be merged: they have no weight of their own (tied to the embedding?)")
    for _, adapter in found:
        if not adapter.is_merged:
            adapter.rest_in(merged_weights(adapter))


def unmerge_lora(model: nn.Module) -> None:
    """Put back the base weights of before :func:`merge_lora`, to the bit; the adapters work again.

    Args:
        model: A model after :func:`merge_lora`; one that is not merged stays as it is.
    """
    for _, adapter in adapters(model):
        adapter.rise()
