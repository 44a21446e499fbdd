"""Every collective that a row of the placement table asks for, broken for itself."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore_lora.adapters.placement import TABLE, Around, Enter, Middle, Placement
from tests import site_runs


def _shard_of(z: Tensor, group: Any) -> Tensor:
    return z.chunk(group.size())[group.rank()]


class _OneSided(torch.autograd.Function):
    """A reduce-scatter whose backward repeats its own gradient in place of gathering."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, group: Any) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        ctx.size = group.size()
        return mappings._reduce_scatter_along_first_dim(z, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.repeat(ctx.size, 1, 1), None


def _mappings() -> Any:
    from megatron.core.tensor_parallel import mappings

    return mappings


#: What stands for the collective on z without sending, in forward (and so in backward), or in backward alone.
MIDDLES: dict[tuple[Middle, str], Callable[[Tensor, Any], Tensor]] = {
    (Middle.GATHER_SEQUENCE, "forward"): lambda z, group: z.repeat(group.size(), 1, 1),
    (Middle.GATHER_SEQUENCE, "backward"): lambda z, group: _mappings().gather_from_sequence_parallel_region(
        z, tensor_parallel_output_grad=False, group=group
    ),
    (Middle.GATHER_RANK, "forward"): lambda z, group: z.repeat(1, 1, group.size()),
    (Middle.GATHER_RANK, "backward"): lambda z, group: _mappings().gather_from_tensor_model_parallel_region(
        z, group=group
    ),
    (Middle.COPY, "backward"): lambda z, group: z,
    (Middle.REDUCE, "forward"): lambda z, group: z,
    (Middle.REDUCE_SCATTER, "forward"): _shard_of,
    (Middle.REDUCE_SCATTER, "backward"): lambda z, group: _OneSided.apply(z, group),
}
ENTERS = {
    Enter.GATHER: ("adapter's gradient", "base's gradient"),
    Enter.REGATHER: ("forward", "gradient"),
    Enter.COPY: ("gradient",),
}


def breakages(row: Placement) -> Iterator[str]:
    """Names of what can be broken in a row."""
    yield from (f"middle {way}" for middle, way in MIDDLES if middle is row.middle)
    yield from (f"enter {what}" for what in ENTERS.get(row.enter, ()))
    yield from (name for name in ("sum_a", "sum_b") if getattr(row, name))
    if row.kind == "row":
        yield "dora norms"


@contextmanager
def broken(row: Placement, what: str) -> Iterator[None]:
    """One collective of a row broken."""
    from lightning_mcore_lora.adapters import dora, layer, linears, planning

    part, _, way = what.partition(" ")
    with pytest.MonkeyPatch.context() as patch:
        if part == "middle":
            patch.setitem(layer._MIDDLE, row.middle, MIDDLES[row.middle, way])
        elif part in ("sum_a", "sum_b"):
            patch.setattr(planning, "lookup", lambda *key: dataclasses.replace(row, **{part: False}))
        elif part == "dora":
            patch.setattr(dora.RowNorms, "__init__", norms_of_this_rank_only(dora.RowNorms.__init__))
        elif row.enter is Enter.COPY:
            patch.setattr(layer.tensor_parallel, "copy_to_tensor_model_parallel_region", lambda x, group: x)
        elif row.enter is Enter.REGATHER:
            patch.setattr(layer, "linear_with_grad_accumulation_and_async_allreduce", _regather_broken(way))
        else:
            patch.setattr(linears._GatherForTwo, "backward", staticmethod(_gather_broken(way)))
        yield


def norms_of_this_rank_only(original: Callable) -> Callable:
    """DoRA's norms without their all-reduce."""

    def build(self: Any, site: Any, placement: Placement) -> None:
        original(self, site, dataclasses.replace(placement, a=placement.b))

    return build


def _regather_broken(way: str) -> Callable:
    def product(x: Tensor, a: Tensor, *args: Any, tp_group: Any, **kwargs: Any) -> Tensor:
        if way == "forward":
            return x.repeat(tp_group.size(), 1, 1) @ a.T
        full = _mappings().gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=tp_group)
        return full @ a.T

    return product


def _gather_broken(way: str) -> Callable:
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        grads = {"base's gradient": first, "adapter's gradient": second}
        mine = {name: _shard_of(grad, ctx.group) for name, grad in grads.items()}
        mine |= {
            name: _mappings()._reduce_scatter_along_first_dim(grad, ctx.group)
            for name, grad in grads.items()
            if name != way
        }
        return sum(mine.values()), None  # type: ignore[return-value]

    return backward


def errors_when_broken(tp: int, around: Around) -> dict[tuple[str, str, str], float]:
    """The largest error on this rank for every row of these surroundings and every breakage in it."""
    found = {}
    for row in TABLE:
        if row.around is not around:
            continue
        for what in breakages(row):
            with broken(row, what):
                options = {"dora": True} if what.startswith("dora") else {}
                errors = site_runs.errors(row.kind, tp, around, row.mode, **options)
            found[row.kind, row.mode, what] = max(errors.values())
    return found
