"""The factors of one adapter: how they are held, begun, summed over peers, loaded and merged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.config import DTYPES, LoRAConfig
from lightning_mcore_lora.adapters.dora import RowNorms
from lightning_mcore_lora.adapters.experts import local_experts, shared_group
from lightning_mcore_lora.adapters.initial import initial_a
from lightning_mcore_lora.adapters.placement import Placement
from lightning_mcore_lora.adapters.producers import Known
from lightning_mcore_lora.adapters.products import Blocks
from lightning_mcore_lora.adapters.sites import Site
from lightning_mcore_lora.parallel import Experts, experts_are_apart


@dataclass(frozen=True)
class Plan:
    """What is to become of a site.

    Args:
        placement: The row of the table to run in training.
        eager: The row to run where ``placement`` cannot (evaluation, recompute): same factors, same numbers.
        rank: Width of the factors.
        alpha: What ``scale`` comes from.
        scale: Factor s.
        parts: Names of the linears that are fused in it and get factors of their own; one empty name if it is one.
        each: Parameters of which each expert has its own; of experts the others are one for all.
        known: The producer of its input, if that is to be computed again.
        fallback: Why it does not run as asked.
    """

    placement: Placement
    eager: Placement
    rank: int
    alpha: float
    scale: float
    parts: tuple[str, ...] = ("",)
    each: frozenset[str] = frozenset()
    known: Known | None = None
    fallback: str | None = None

    @property
    def width(self) -> int:
        """Width of z: the rank of each part."""
        return self.rank * len(self.parts)

    def dim(self, name: str) -> int | None:
        """The dimension of a parameter that is sharded."""
        dim = (self.placement.a if name == "a" else self.placement.b).dim()
        return None if dim is None else dim + (name in self.each)

    def is_partial(self, name: str) -> bool:
        """Whether a parameter's gradient is a part on each rank of the linear's group."""
        return self.placement.sum_a if name == "a" else self.placement.sum_b

    def shape(self, name: str, site: Site) -> tuple[int, ...]:
        """What a rank holds of a parameter."""
        whole = {"a": (self.width, site.d_in), "b": (site.d_out, self.rank), "magnitude": (site.d_out,)}[name]
        shape = [site.experts, *whole] if name in self.each else list(whole)
        dim = self.dim(name)
        if dim is not None:
            shape[dim] //= site.group.size()
        return tuple(shape)


class Factors(NamedTuple):
    """What one product needs: of one linear, or of several experts with a first dimension.

    Args:
        a: A.
        b: B.
        ratio: With DoRA the magnitude over the row norm.
    """

    a: Tensor
    b: Tensor
    ratio: Tensor | None


class HeldFactors(nn.Module):
    """``a``, ``b`` and, with DoRA, ``magnitude``, as one row of the placement table holds them.

    They carry Megatron-Core's marks (``tensor_model_parallel``, ``partition_dim``, ``allreduce``), which norms,
    reductions and checkpoints go by. Canonical adapters hold the A's of their parts one below the other. Of experts one
    module holds the factors of all that this rank has, ``[experts, ...]``, or one factor for all.

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
        self._unmerged: list[Tensor] | None = None  # the base's weights, while they have the adapter in them
        self._dtype = DTYPES[config.dtype]
        # A buffer, so that it moves with the model.
        self.register_buffer("_rows", _part_of_each_row(site) if len(plan.parts) > 1 else None, persistent=False)
        a = initial_a(site, plan.rank, config.init, config.seed, plan.parts, "a" in plan.each)
        b = torch.zeros((site.experts, site.d_out, plan.rank) if "b" in plan.each else (site.d_out, plan.rank))
        self.a = self._parameter(self._shard(a, "a"), "a")
        self.b = self._parameter(self._shard(b, "b"), "b")
        self.magnitude: nn.Parameter | None = None
        if config.dora:
            self._norms = RowNorms(site, plan.placement)
            self.magnitude = self._parameter(self._row_norms(), "magnitude")
        self.a.requires_grad_(not config.freeze_a)

    def _stride(self, name: str) -> int:
        """Blocks of that dimension that are sharded each for itself."""
        return 1 if name == "a" else self.site.output_parts

    def _parameter(self, part: Tensor, name: str) -> nn.Parameter:
        dim = self.plan.dim(name)
        parameter: Any = nn.Parameter(part.to(device=self.site.like.device, dtype=self._dtype, copy=True).contiguous())
        sharded = dim is not None and self.site.group.size() > 1
        set_tensor_model_parallel_attributes(parameter, sharded, dim if dim is not None else -1, self._stride(name))
        parameter.allreduce = not (self.site.experts and experts_are_apart())
        parameter.is_vocabulary = name != "a" and self.site.leaf == "output_layer"
        if self.site.experts:
            parameter.experts = Experts.EACH if name in self.plan.each else Experts.ALL
        return parameter

    def _shard(self, full: Tensor, name: str) -> Tensor:
        """This rank's shard of a whole factor; of gate and of up each where the output holds both."""
        dim, group = self.plan.dim(name), self.site.group
        if dim is None:
            return full
        parts = full.chunk(self._stride(name), dim)
        return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts], dim)

    def defer_sums(self, defer: bool) -> None:
        """Leave the sums of gradients over peers to whoever finalizes them once per step, or take them back.

        In autograd each sum is a collective of its own in every backward: right in any loop. Megatron-Core's
        ``finalize_model_grads`` joins those of all parameters marked ``sequence_parallel`` into one; the rest are
        :meth:`deferred_sums`.
        """
        self.sums_in_autograd = not defer
        for name, parameter in self.named_parameters():
            parameter.sequence_parallel = (  # type: ignore[attr-defined]
                defer and not self.site.experts and self.plan.is_partial(name)
            )

    def deferred_sums(self) -> Iterator[tuple[nn.Parameter, ProcessGroup]]:
        """Parameters of experts whose gradients are to be summed, and over which group."""
        for name, parameter in self.named_parameters():
            group = self.sum_group(name) if self.site.experts and parameter.requires_grad else None
            if group is not None:
                yield parameter, group

    def sum_group(self, name: str) -> ProcessGroup | None:
        """The processes over which a parameter's gradient is summed, beside data-parallel ones."""
        group = self.site.group if self.plan.is_partial(name) else None
        if self.site.experts and name not in self.plan.each:  # each expert-parallel peer saw its own experts' tokens
            group = shared_group(group)
        return group if group is not None and group.size() > 1 else None

    def check_works(self) -> None:
        """Check that the adapter is not merged.

        Raises:
            ValueError: If it is: the base would go on computing what it was.
        """
        if self.is_merged:
            raise ValueError(f"{self.site.name}: the adapters are merged into the base: unmerge_lora(model) first")

    @torch.no_grad()
    def load_full(self, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> None:
        """Set the factors from whole ones, the same on every rank.

        Args:
            a: ``[rank, d_in]``, of canonical adapters ``[parts * rank, d_in]``; ``[experts, ...]``, of all ranks'
                experts, where each has its own.
            b: ``[d_out, rank]``, rows in the order of the base's whole weight: query groups, or all gate then all up;
                ``[experts, ...]`` as of A.
            magnitude: ``[d_out]``, in the same order, of experts ``[experts, d_out]``; ``None`` takes the row norms
                with these factors.
        """
        self.check_works()
        self.a.copy_(self._shard(self._local(a, "a"), "a"))
        self.b.copy_(self._shard(self._local(b, "b"), "b"))
        if self.magnitude is not None:
            whole = (
                self._row_norms()
                if magnitude is None
                else self._shard(self._local(magnitude, "magnitude"), "magnitude")
            )
            self.magnitude.copy_(whole)

    def _local(self, full: Tensor, name: str) -> Tensor:
        """The values of this rank's experts."""
        return full[list(local_experts(self.site))] if name in self.plan.each else full

    @property
    def is_merged(self) -> bool:
        """Whether the base's weights have the adapter in them."""
        return self._unmerged is not None

    @torch.no_grad()
    def rest_in(self, merged: Sequence[Tensor]) -> None:
        """Rest from now on: the base's weights become these, and what they were is kept in host memory."""
        weights = self.site.weights()
        self._unmerged = [weight.detach().to("cpu", copy=True) for weight in weights]
        for weight, value in zip(weights, merged, strict=True):
            weight.copy_(value)

    @torch.no_grad()
    def rise(self) -> None:
        """Work again: the base's weights become what they were."""
        for weight, value in zip(self.site.weights(), self._unmerged or (), strict=self.is_merged):
            weight.copy_(value)
        self._unmerged = None

    def _factors(self) -> Factors:
        """The factors, with what autograd needs to sum their gradients."""
        ratio = None
        if self.magnitude is not None:
            ratio = self._summed("magnitude") / self._row_norms()
        return Factors(self._summed("a"), self._summed("b"), ratio)

    def _summed(self, name: str) -> Tensor:
        """A parameter, whose gradient is summed over the peers where this rank's is only a part."""
        parameter = getattr(self, name)
        group = self.sum_group(name) if self.sums_in_autograd and parameter.requires_grad else None
        if group is None:
            return parameter
        return tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=group)

    def _blocks(self) -> Blocks | None:
        return None if self._rows is None else Blocks(self._rows, len(self.plan.parts))

    def _of_each(self) -> tuple[list[Tensor], list[Tensor]]:
        """A, and B as wide as z, of each weight of the site."""
        blocks, count = self._blocks(), len(self.site.weights())
        b = blocks.expand(self.b) if blocks else self.b
        pairs = (("a", self.a), ("b", b))
        a_each, b_each = (list(value) if name in self.plan.each else [value] * count for name, value in pairs)
        return a_each, b_each

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        norms = self._norms(*self._of_each(), self.plan.scale)
        return norms if self.site.experts else norms[0]


def _part_of_each_row(site: Site) -> Tensor:
    """Number of the fused part that each output row of this rank belongs to, ``[d_out]``."""
    block = torch.cat([torch.full((part.rows,), i) for i, part in enumerate(site.parts())])
    return block.repeat(site.d_out // site.group.size() // len(block)).to(site.like.device)
