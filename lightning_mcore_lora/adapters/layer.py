"""The adapter module: runs one row of the placement table beside its base linear."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.layers import (
    linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.placement import Enter, Factor, Middle, Placement
from lightning_mcore_lora.adapters.sites import Site

_MIDDLE: dict[Middle, Callable[[Tensor, ProcessGroup], Tensor]] = {
    Middle.GATHER_SEQUENCE: lambda z, group: tensor_parallel.gather_from_sequence_parallel_region(z, group=group),
    Middle.GATHER_RANK: lambda z, group: mappings.all_gather_last_dim_from_tensor_parallel_region(z, group=group),
    Middle.COPY: lambda z, group: tensor_parallel.copy_to_tensor_model_parallel_region(z, group=group),
    Middle.REDUCE: lambda z, group: tensor_parallel.reduce_from_tensor_model_parallel_region(z, group=group),
    Middle.REDUCE_SCATTER: lambda z, group: tensor_parallel.reduce_scatter_to_sequence_parallel_region(z, group=group),
}


class _GatherForTwo(torch.autograd.Function):
    """All-gather a sequence shard once for two readers; each reader's gradient is reduce-scattered by itself.

    Keeping the two reduce-scatters apart makes ``gather`` bitwise equal to ``regather``, which cannot join them.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        full = mappings._gather_along_first_dim(shard, group)
        return full, full.view_as(full)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        first, second = (mappings._reduce_scatter_along_first_dim(grad, ctx.group) for grad in (first, second))
        return first + second, None


class LoRAAdapter(nn.Module):
    r"""Adds :math:`s B (A x)` to the output of a base linear, in the base's parallel state.

    ``a`` and ``b`` hold this rank's part of the factors in float32 and carry Megatron-Core's marks
    (``tensor_model_parallel``, ``partition_dim``, ``allreduce``), which norms, reductions and checkpoints go by.

    Args:
        site: The base linear's site.
        placement: The row of the table to run in training.
        eager: The row to run where ``placement`` cannot (evaluation, recompute): same factors, same numbers.
        rank: Width of the factors over all ranks.
        scale: Factor s.
        seed: Seed of the initial A.
    """

    def __init__(
        self, site: Site, placement: Placement, eager: Placement, *, rank: int, scale: float, seed: int
    ) -> None:
        super().__init__()
        self.site = site
        self.placement = placement
        self.eager = eager
        self.rank = rank
        self.scale = scale
        self.sums_in_autograd = True
        self.a = self._factor(_full_fan_a(site, rank, seed), placement.a, parts=1)
        self.b = self._factor(torch.zeros(site.d_out, rank, dtype=torch.float32), placement.b, parts=site.output_parts)

    def _factor(self, full: Tensor, held: Factor, parts: int) -> nn.Parameter:
        dim = held.dim()
        sharded = dim is not None and self.site.group.size() > 1
        device = self.site.linear.weight.device
        factor = nn.Parameter(self._part(full, dim, parts).to(device=device, copy=True).contiguous())
        set_tensor_model_parallel_attributes(factor, sharded, dim if dim is not None else -1, parts)
        factor.allreduce = True  # type: ignore[attr-defined]
        return factor

    def _part(self, full: Tensor, dim: int | None, parts: int) -> Tensor:
        """This rank's share of a whole factor; of gate and of up each where the output holds both."""
        if dim is None:
            return full
        group = self.site.group
        return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in full.chunk(parts, dim)], dim)

    def defer_sums(self, defer: bool) -> None:
        """Leave the sums of replicated factors' gradients to ``finalize_model_grads``, or take them back.

        In autograd each sum is a collective of its own in every backward: right in any loop. Megatron-Core's function
        joins those of all parameters marked ``sequence_parallel`` into one, once per optimizer step.
        """
        self.sums_in_autograd = not defer
        self.a.sequence_parallel = defer and self.placement.sum_a  # type: ignore[attr-defined]
        self.b.sequence_parallel = defer and self.placement.sum_b  # type: ignore[attr-defined]

    @torch.no_grad()
    def load_full(self, a: Tensor, b: Tensor) -> None:
        """Set the factors from whole ones, the same on every rank.

        Args:
            a: ``[rank, d_in]``.
            b: ``[d_out, rank]``, rows in the order of the base's whole weight: query groups, or all gate then all up.
        """
        self.a.copy_(self._part(a, self.placement.a.dim(), 1))
        self.b.copy_(self._part(b, self.placement.b.dim(), self.site.output_parts))

    def extra_repr(self) -> str:
        """Shown in the model's printout."""
        return f"rank={self.rank}, scale={self.scale:g}, mode={self.placement.mode}"

    def current_placement(self) -> Placement:
        """The row that this forward runs: re-gathering pays only where a backward follows and nothing recomputes."""
        trains = self.training and torch.is_grad_enabled() and self.a.requires_grad
        return self.placement if trains and not random.is_checkpointing() else self.eager

    def forward(self, base: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run base and adapter.

        Args:
            base: The base linear's own forward; returns output and bias, as Megatron-Core's linears do.
            x: The base's input, ``[sequence or its shard, batch, d_in or its shard]``.
            *args: Passed to ``base``.
            **kwargs: Passed to ``base``.

        Returns:
            The base's output with the adapter's added, and the base's bias.
        """
        placement, group = self.current_placement(), self.site.group
        base_input = x
        if placement.enter is Enter.GATHER and group.size() > 1:
            base_input, x = _GatherForTwo.apply(x, group)
            output, bias = self.site.on_gathered_input(base, base_input, *args, **kwargs)
        else:
            output, bias = base(base_input, *args, **kwargs)
        z = self._times_a(x, placement)
        z = _MIDDLE[placement.middle](z * self.scale, group)
        b = self._summed(self.b, placement.sum_b)
        return output + nn.functional.linear(z, b.to(z.dtype)).to(output.dtype), bias

    def _summed(self, factor: Tensor, partial: bool) -> Tensor:
        """The factor, whose gradient is summed over the group where this rank's is only a part."""
        if partial and self.sums_in_autograd:
            return tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=self.site.group)
        return factor

    def _times_a(self, x: Tensor, placement: Placement) -> Tensor:
        group, a = self.site.group, self._summed(self.a, placement.sum_a)
        if placement.a is not Factor.RANK:
            return nn.functional.linear(x, a.to(x.dtype))
        # Under autocast Megatron-Core's product would reduce-scatter a gradient of another dtype than its input's.
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        # The one product of gather and regather: what differs is only whether it gathers its input itself.
        return linear_with_grad_accumulation_and_async_allreduce(
            x.to(dtype),
            a.to(dtype),
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=placement.enter is Enter.COPY and group.size() > 1,
            sequence_parallel=placement.enter is Enter.REGATHER and group.size() > 1,
            grad_output_buffer=None,
            wgrad_deferral_limit=0,
            tp_group=group,
        )


def _full_fan_a(site: Site, rank: int, seed: int) -> Tensor:
    """The whole initial A, the same on every rank and at every layout: uniform within 1/sqrt(d_in), as PEFT's default.

    That is Kaiming-uniform with ``a=sqrt(5)`` over the full input dimension, never over a shard of it.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(site.name.encode()) + seed)
    bound = site.d_in**-0.5
    return torch.empty(rank, site.d_in, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
