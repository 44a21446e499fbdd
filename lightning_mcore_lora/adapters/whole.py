"""Whole factors of an adapter, put together from what the ranks hold."""

from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.sites import Site
from lightning_mcore_lora.models import layouts
from lightning_mcore_lora.models.layouts import Layout
from lightning_mcore_lora.parallel import Experts


class Whole(NamedTuple):
    """The factors of one adapter over all ranks.

    Args:
        a: ``[rank, d_in]``, of canonical adapters ``[parts * rank, d_in]``; of experts ``[experts, ...]``.
        b: ``[d_out, rank]``, rows in the order of the base's whole weight: query groups, or all gate then all up; of
            experts ``[experts, ...]``.
        magnitude: ``[d_out]`` in the same order; of experts ``[experts, d_out]``; ``None`` without DoRA.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None

    def cpu(self) -> "Whole":
        """The same, on the CPU."""
        return Whole(self.a.cpu(), self.b.cpu(), None if self.magnitude is None else self.magnitude.cpu())


@torch.no_grad()
def whole_factors(adapter: LoRAAdapter, of_all_experts: bool = True) -> Whole:
    """The whole factors, on every rank; what experts share is repeated for each.

    A collective over the site's group, and with all experts over the expert-parallel one.

    Args:
        adapter: The adapter.
        of_all_experts: Whether to give the factors of all ranks' experts, or of those of this rank.
    """
    parallel = parallel_state.get_expert_model_parallel_group() if adapter.site.experts and of_all_experts else None

    def whole(parameter: Tensor) -> Tensor:
        value = whole_parameter(parameter, adapter.site.group)
        return torch.cat(_from_all(value, parallel)) if getattr(parameter, "experts", None) is Experts.EACH else value

    a, b = whole(adapter.a), whole(adapter.b)
    magnitude = None if adapter.magnitude is None else whole(adapter.magnitude)
    if adapter.site.experts:
        count = adapter.site.experts * (1 if parallel is None else parallel.size())
        a, b = (value if value.dim() == 3 else value.expand(count, *value.shape) for value in (a, b))
    return Whole(a, b, magnitude)


@torch.no_grad()
def whole_parameter(parameter: Tensor, group: ProcessGroup) -> Tensor:
    """A parameter put together from its shards, by its marks.

    Args:
        parameter: This rank's part.
        group: The processes that hold the shards.

    Returns:
        The whole one, on every rank and on the parameter's device.
    """
    value = parameter.detach()
    if not getattr(parameter, "tensor_model_parallel", False):
        return value
    dim, stride = parameter.partition_dim, getattr(parameter, "partition_stride", 1)  # type: ignore[attr-defined]
    blocks = [part.chunk(stride, dim) for part in _from_all(value, group)]
    return torch.cat([part[i] for i in range(stride) for part in blocks], dim)


def _from_all(value: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [value]
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, value.contiguous(), group=group)
    return parts


def layout_of(site: Site) -> Layout:
    """How the linear's weight is made of the linears that it would be in a Hugging Face model."""
    if site.parts():
        return layouts.qkv if site.leaf == "linear_qkv" else layouts.gate_up
    return {"column": layouts.rows, "row": layouts.columns, "duplicated": layouts.replicated}[site.kind]


def heads_of(site: Site) -> layouts.Heads:
    """The attention heads of the model around a site."""
    config = site.config
    groups = getattr(config, "num_query_groups", None) or getattr(config, "num_attention_heads", None) or 1
    return layouts.Heads(groups, getattr(config, "kv_channels", None) or 1)
