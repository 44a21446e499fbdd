"""The adapter module: runs one row of the placement table beside its base linear."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
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

from lightning_mcore_lora.adapters.config import DTYPES, LoRAConfig
from lightning_mcore_lora.adapters.dora import RowNorms
from lightning_mcore_lora.adapters.initial import initial_a
from lightning_mcore_lora.adapters.linears import bias_of
from lightning_mcore_lora.adapters.placement import Enter, Factor, Middle, Placement, Sees
from lightning_mcore_lora.adapters.producers import Known, Producer
from lightning_mcore_lora.adapters.products import Blocks, Dropout, down, drop, up
from lightning_mcore_lora.adapters.sites import Site

_MIDDLE: dict[Middle, Callable[[Tensor, ProcessGroup], Tensor]] = {
    Middle.AS_IS: lambda z, group: z,
    Middle.GATHER_SEQUENCE: lambda z, group: tensor_parallel.gather_from_sequence_parallel_region(z, group=group),
    Middle.GATHER_RANK: lambda z, group: mappings.all_gather_last_dim_from_tensor_parallel_region(z, group=group),
    Middle.COPY: lambda z, group: tensor_parallel.copy_to_tensor_model_parallel_region(z, group=group),
    Middle.REDUCE: lambda z, group: tensor_parallel.reduce_from_tensor_model_parallel_region(z, group=group),
    Middle.REDUCE_SCATTER: lambda z, group: tensor_parallel.reduce_scatter_to_sequence_parallel_region(z, group=group),
}


@dataclass(frozen=True)
class Plan:
    """What is to become of a site.

    Args:
        placement: The row of the table to run in training.
        eager: The row to run where ``placement`` cannot (evaluation, recompute): same factors, same numbers.
        rank: Width of the factors.
        scale: Factor s.
        parts: Names of the linears that are fused in it and get factors of their own; one empty name if it is one.
        known: The producer of its input, if that is to be computed again.
        fallback: Why it does not run as asked.
    """

    placement: Placement
    eager: Placement
    rank: int
    scale: float
    parts: tuple[str, ...] = ("",)
    known: Known | None = None
    fallback: str | None = None

    @property
    def width(self) -> int:
        """Width of z: the rank of each part."""
        return self.rank * len(self.parts)


class LoRAAdapter(nn.Module):
    r"""Adds :math:`s B (A x)` to the output of a base linear, in the base's parallel state.

    ``a``, ``b`` and, with DoRA, ``magnitude`` hold this rank's part and carry Megatron-Core's marks
    (``tensor_model_parallel``, ``partition_dim``, ``allreduce``), which norms, reductions and checkpoints go by.
    Canonical adapters hold the A's of their parts one below the other.

    Args:
        site: The base linear's site.
        plan: What is to become of it.
        config: The user's settings.
    """

    def __init__(self, site: Site, plan: Plan, config: LoRAConfig) -> None:
        super().__init__()
        self.site = site
        self.plan = plan
        self.config = config
        self.sums_in_autograd = True
        self._rows: Tensor | None
        self._dtype = DTYPES[config.dtype]
        # A buffer, so that it moves with the model.
        self.register_buffer("_rows", _part_of_each_row(site) if len(plan.parts) > 1 else None, persistent=False)
        self._producer: Producer | None = None
        self._before: Any = None  # attributes of the linear to put back
        placement, rows = plan.placement, site.output_parts
        a = initial_a(site, plan.rank, config.init, config.seed, plan.parts)
        self.a = self._factor(self._part(a, placement.a.dim(), 1), placement.a, 1)
        b = torch.zeros(site.d_out, plan.rank)
        self.b = self._factor(self._part(b, placement.b.dim(), rows), placement.b, rows)
        self.magnitude: nn.Parameter | None = None
        if config.dora:
            self._norms = RowNorms(site, placement)
            self.magnitude = self._factor(self._row_norms(), placement.b, rows)
        self.a.requires_grad_(not config.freeze_a)

    def _factor(self, part: Tensor, held: Factor, parts: int) -> nn.Parameter:
        dim = held.dim()
        sharded = dim is not None and self.site.group.size() > 1
        factor = nn.Parameter(part.to(device=self.site.like.device, dtype=self._dtype, copy=True).contiguous())
        set_tensor_model_parallel_attributes(factor, sharded, dim if dim is not None else -1, parts)
        factor.allreduce = True  # type: ignore[attr-defined]
        return factor

    def _part(self, full: Tensor, dim: int | None, parts: int) -> Tensor:
        """This rank's share of a whole factor; of gate and of up each where the output holds both."""
        if dim is None:
            return full
        group = self.site.group
        return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in full.chunk(parts, dim)], dim)

    def attach(self) -> None:
        """Sit beside the base linear, under its name ``lora``."""
        linear, row = self.site.linear, self.site.type
        self.train(linear.training)
        self._before = row.attach(linear)
        setattr(linear, row.method, functools.partial(self, getattr(linear, row.method)))
        linear.lora = self
        if self.plan.known is not None:
            self._producer = Producer(*self.plan.known)

    def detach(self) -> None:
        """Leave the base linear as it was."""
        linear, row = self.site.linear, self.site.type
        if self._producer is not None:
            self._producer.remove()
        delattr(linear, row.method)
        del linear.lora
        row.detach(linear, self._before)

    def defer_sums(self, defer: bool) -> None:
        """Leave the sums of replicated factors' gradients to ``finalize_model_grads``, or take them back.

        In autograd each sum is a collective of its own in every backward: right in any loop. Megatron-Core's function
        joins those of all parameters marked ``sequence_parallel`` into one, once per optimizer step.
        """
        self.sums_in_autograd = not defer
        for name, parameter in self.named_parameters():
            parameter.sequence_parallel = defer and self._is_partial(name)  # type: ignore[attr-defined]

    def _is_partial(self, name: str) -> bool:
        return self.plan.placement.sum_a if name == "a" else self.plan.placement.sum_b

    @torch.no_grad()
    def load_full(self, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> None:
        """Set the factors from whole ones, the same on every rank.

        Args:
            a: ``[rank, d_in]``, of canonical adapters ``[parts * rank, d_in]``.
            b: ``[d_out, rank]``, rows in the order of the base's whole weight: query groups, or all gate then all up.
            magnitude: ``[d_out]``, in the same order; ``None`` takes the row norms with these factors.
        """
        placement, rows = self.plan.placement, self.site.output_parts
        self.a.copy_(self._part(a, placement.a.dim(), 1))
        self.b.copy_(self._part(b, placement.b.dim(), rows))
        if self.magnitude is not None:
            whole = self._row_norms() if magnitude is None else self._part(magnitude, placement.b.dim(), rows)
            self.magnitude.copy_(whole)

    def facts(self) -> str:
        """All that must be the same on every rank, in words."""
        return f"{self.site.name}: {self.extra_repr()}, {self.plan.placement.name}, {self.config}"

    def extra_repr(self) -> str:
        """Shown in the model's printout."""
        return f"rank={self.plan.rank}, scale={self.plan.scale:g}, mode={self.plan.placement.mode}"

    def current_placement(self) -> Placement:
        """The row that this forward runs: re-gathering pays only where a backward follows and nothing recomputes."""
        if self.training and self.config.dropout:
            return self.plan.placement  # masks differ from row to row, and a checkpoint's two forwards must agree
        trains = self.training and torch.is_grad_enabled() and self.a.requires_grad
        return self.plan.placement if trains and not random.is_checkpointing() else self.plan.eager

    def forward(self, base: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run base and adapter.

        Args:
            base: The base linear's own method.
            x: The base's input, ``[sequence or its shard, batch, d_in or its shard]``.
            *args: Passed to ``base``.
            **kwargs: Passed to ``base``.

        Returns:
            What the base returns, with the adapter's output added.
        """
        placement, group = self.current_placement(), self.site.group
        source = self._producer.take(x) if self._producer is not None else None
        gather = placement.enter is Enter.GATHER and group.size() > 1
        ran = self.site.type.run(self.site.linear, base, x, gather, args, kwargs)
        dropout = self._draw(placement)
        scale = self.plan.scale / (1 - dropout.p) if dropout else self.plan.scale
        product = self._regathered if placement.enter is Enter.REGATHER and group.size() > 1 else self._down
        z = product(ran.x, placement, dropout, source)
        z = _MIDDLE[placement.middle](z * scale, group)
        output = up(ran.output, z, self._summed("b"), self._blocks())
        return ran.finish(self._with_magnitude(output))

    def _draw(self, placement: Placement) -> Dropout | None:
        if not self.training or not self.config.dropout:
            return None
        return Dropout.draw(self.config.dropout, 0 if placement.sees is Sees.ALL else self.site.group.rank())

    def _summed(self, name: str) -> Tensor:
        """A factor, whose gradient is summed over the group where this rank's is only a part."""
        factor = getattr(self, name)
        if self.sums_in_autograd and self._is_partial(name) and factor.requires_grad:
            return tensor_parallel.copy_to_tensor_model_parallel_region(factor, group=self.site.group)
        return factor

    def _down(self, x: Tensor, placement: Placement, dropout: Dropout | None, source: Any) -> Tensor:
        if placement.enter is Enter.COPY and self.site.group.size() > 1:
            x = tensor_parallel.copy_to_tensor_model_parallel_region(x, group=self.site.group)
        return down(x, self._summed("a"), _product_dtype(x), source, dropout)

    def _regathered(self, x: Tensor, placement: Placement, dropout: Dropout | None, source: Any) -> Tensor:
        # Under autocast Megatron-Core's product would reduce-scatter a gradient of another dtype than its input's.
        dtype = _product_dtype(x)
        x = x.to(dtype)
        return linear_with_grad_accumulation_and_async_allreduce(
            drop(x, dropout) if dropout else x,
            self.a.to(dtype),
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=True,
            grad_output_buffer=None,
            wgrad_deferral_limit=0,
            tp_group=self.site.group,
        )

    def _blocks(self) -> Blocks | None:
        return None if self._rows is None else Blocks(self._rows, len(self.plan.parts))

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        blocks = self._blocks()
        b = blocks.expand(self.b) if blocks else self.b
        return self._norms(self.a, b, self.plan.scale)

    def _with_magnitude(self, output: Tensor) -> Tensor:
        if self.magnitude is None:
            return output
        ratio = (self._summed("magnitude") / self._row_norms()).to(output.dtype)
        bias = _added_bias(self.site.linear)
        return output * ratio if bias is None else (output - bias) * ratio + bias


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _part_of_each_row(site: Site) -> Tensor:
    """Number of the fused part that each output row of this rank belongs to, ``[d_out]``."""
    block = torch.cat([torch.full((part.rows,), i) for i, part in enumerate(site.parts())])
    return block.repeat(site.d_out // site.group.size() // len(block)).to(site.like.device)


def _added_bias(linear: Any) -> Tensor | None:
    """The bias that is in the base's output already, not left to its caller."""
    if getattr(linear, "skip_bias_add", False) or getattr(linear, "te_return_bias", False):
        return None
    return bias_of(linear)
