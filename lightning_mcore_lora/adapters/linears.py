"""The types of linears that an adapter can sit beside. One type is one row of :data:`LINEARS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    mappings,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.placement import Around


class Facts(NamedTuple):
    """What an adapter must know of a linear.

    Args:
        group: Its tensor-parallel group.
        d_in: Input features over all ranks.
        d_out: Output features over all ranks.
        around: What surrounds it, in the placement table's words.
    """

    group: ProcessGroup
    d_in: int
    d_out: int
    around: Around


class Ran(NamedTuple):
    """What the base linear gave.

    Args:
        output: Its output, to which the adapter's is added.
        x: The adapter's input.
        finish: Makes of the sum what the linear returns.
    """

    output: Tensor
    x: Tensor
    finish: Callable[[Tensor], Any]


Run = Callable[..., Ran]


@dataclass(frozen=True)
class LinearType:
    """One row of :data:`LINEARS`.

    Args:
        cls: Module and name of the class.
        kind: Its kind in the placement table.
        facts: Reads the facts of a linear.
        run: ``run(linear, base, x, gather, args, kwargs)`` calls the linear's own method; with ``gather`` the adapter's
            input is to be gathered along the sequence, once for both.
        method: The method that multiplies.
        makes_input: Whether the linear makes the adapter's input, returns it, and so keeps it for backward by itself.
        shares_gather: Whether one gather of the sequence serves the linear and its adapter.
        grouped: Whether it holds the linears of several experts, and is called with their token counts.
        attach: Prepares it for an adapter, and returns what was there before.
        detach: Puts that back.
    """

    cls: str
    kind: str
    facts: Callable[[Any], Facts]
    run: Run
    method: str = "forward"
    makes_input: bool = False
    shares_gather: bool = False
    grouped: bool = False
    attach: Callable[[Any], Any] = lambda linear: None
    detach: Callable[[Any, Any], None] = lambda linear, before: None


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


# -- Megatron-Core's own -------------------------------------------------------------------------------------------


def _around(group: ProcessGroup, sequence: Any, removed: Any) -> Around:
    if removed:
        return Around.REMOVED
    return Around.SEQUENCE if sequence and group.size() > 1 else Around.WHOLE


def _mcore_facts(linear: Any) -> Facts:
    around = _around(linear.tp_group, linear.sequence_parallel, linear.is_expert or linear.explicit_expert_comm)
    return Facts(linear.tp_group, linear.input_size, linear.output_size, around)


def _run_column(linear: Any, base: Callable[..., Any], x: Tensor, gather: bool, args: tuple, kwargs: dict) -> Ran:
    # The sum is gathered, not the base's output and the adapter's each for itself.
    wanted = kwargs.get("runtime_gather_output")
    gather_output = linear.gather_output if wanted is None else wanted
    kwargs = {**kwargs, "runtime_gather_output": False}
    if gather:
        full, x = _GatherForTwo.apply(x, linear.tp_group)
        # Without sequence parallelism the linear would all-reduce its input's gradient; `disable_grad_reduce` leaves
        # the partial gradient to whoever gathered the input.
        before = linear.sequence_parallel, linear.disable_grad_reduce
        linear.sequence_parallel, linear.disable_grad_reduce = False, True
        try:
            output, bias = base(full, *args, **kwargs)
        finally:
            linear.sequence_parallel, linear.disable_grad_reduce = before
    else:
        output, bias = base(x, *args, **kwargs)

    def finish(output: Tensor) -> tuple[Tensor, Tensor | None]:
        if gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=linear.tp_group)
        return output, bias

    return Ran(output, x, finish)


def _run_pair(linear: Any, base: Callable[..., Any], x: Tensor, gather: bool, args: tuple, kwargs: dict) -> Ran:
    output, bias = base(x, *args, **kwargs)
    return Ran(output, x, lambda output: (output, bias))


# -- duplicated over the tensor-parallel group ---------------------------------------------------------------------


def _plain_facts(linear: Any) -> Facts:
    # Megatron-Core marks weights that see a shard of the sequence; on others every rank sees all tokens.
    group = getattr(linear, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    d_out, d_in = linear.weight.shape
    return Facts(group, d_in, d_out, _around(group, getattr(linear.weight, "sequence_parallel", False), False))


def _run_tensor(linear: Any, base: Callable[..., Any], x: Tensor, gather: bool, args: tuple, kwargs: dict) -> Ran:
    return Ran(base(x, *args, **kwargs), x, lambda output: output)


# -- Transformer Engine: features are counted per rank --------------------------------------------------------------


def _te_around(linear: Any) -> Around:
    # Without collectives of its own it is told of no parallel mode.
    removed = linear.parallel_mode is None or hasattr(linear, "explicit_expert_comm")
    return _around(linear._tp_group, linear.sequence_parallel, removed)


def _te_column_facts(linear: Any) -> Facts:
    group = linear._tp_group
    return Facts(group, linear.in_features, linear.out_features * group.size(), _te_around(linear))


def _te_row_facts(linear: Any) -> Facts:
    group = linear._tp_group
    return Facts(group, linear.in_features * group.size(), linear.out_features, _te_around(linear))


def _run_te_column(linear: Any, base: Callable[..., Any], x: Tensor, gather: bool, args: tuple, kwargs: dict) -> Ran:
    output, bias = base(x, *args, **kwargs)
    if gather:  # the linear's own gather is inside its kernel
        x = gather_from_sequence_parallel_region(x, group=linear._tp_group)
    return Ran(output, x, lambda output: (output, bias))


def _run_te_norm_column(
    linear: Any, base: Callable[..., Any], x: Tensor, gather: bool, args: tuple, kwargs: dict
) -> Ran:
    result = base(x, *args, **kwargs)
    # Transformer Engine gives (out, bias, normed), or out and normed as the one thing that Megatron-Core's wrapper
    # pairs with a bias of None.
    (output, normed), bias = ((result[0], result[2]), result[1]) if len(result) == 3 else result
    if gather:
        normed = gather_from_sequence_parallel_region(normed, group=linear._tp_group)
    return Ran(output, normed, lambda output: (output, bias))


def _return_norm(linear: Any) -> tuple[bool, bool]:
    # Never the gathered one: the backward of Transformer Engine 2 adds no gradient that comes into it.
    before = linear.return_layernorm_output, linear.return_layernorm_output_gathered
    linear.return_layernorm_output, linear.return_layernorm_output_gathered = True, False
    return before


def _return_as_before(linear: Any, before: tuple[bool, bool]) -> None:
    linear.return_layernorm_output, linear.return_layernorm_output_gathered = before


_MCORE = "megatron.core.tensor_parallel.layers"
_ROUTER = "megatron.core.transformer.moe.router"
_TE = "megatron.core.extensions.transformer_engine"

LINEARS: tuple[LinearType, ...] = (
    LinearType(f"{_MCORE}.ColumnParallelLinear", "column", _mcore_facts, _run_column, shares_gather=True),
    LinearType(f"{_MCORE}.RowParallelLinear", "row", _mcore_facts, _run_pair),
    LinearType(f"{_ROUTER}.TopKRouter", "duplicated", _plain_facts, _run_tensor, method="gating"),
    LinearType("torch.nn.modules.linear.Linear", "duplicated", _plain_facts, _run_tensor),
    LinearType(f"{_TE}.TELinear", "duplicated", _plain_facts, _run_pair),
    LinearType(f"{_TE}.TEColumnParallelLinear", "column", _te_column_facts, _run_te_column),
    LinearType(f"{_TE}.TERowParallelLinear", "row", _te_row_facts, _run_pair),
    LinearType(
        f"{_TE}.TELayerNormColumnParallelLinear",
        "column",
        _te_column_facts,
        _run_te_norm_column,
        makes_input=True,
        attach=_return_norm,
        detach=_return_as_before,
    ),
    LinearType(f"{_TE}.TEColumnParallelGroupedLinear", "column", _te_column_facts, _run_pair, grouped=True),
    LinearType(f"{_TE}.TERowParallelGroupedLinear", "row", _te_row_facts, _run_pair, grouped=True),
)


def bias_of(linear: Any, number: int | str = "") -> Tensor | None:
    """The bias of a linear, of the numbered one if it holds several; Transformer Engine has an empty one for none."""
    bias = getattr(linear, f"bias{number}", None)
    return bias if bias is not None and bias.numel() else None


def linear_type(module: nn.Module) -> LinearType | None:
    """The row for a module; subclasses have rows of their own."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return next((row for row in LINEARS if row.cls == name), None)
