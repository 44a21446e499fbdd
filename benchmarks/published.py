"""The published scheme of adapters under sequence parallelism, as a peer to compare with.

Both factors are sharded: A of a column-parallel linear on rank, B of a row-parallel one on d_out, so that a
row-parallel site gathers its output over the features and then takes its shard of the sequence. Column-parallel sites
gather their input again in backward. The output is scaled and added out of place.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor, nn


class PublishedAdapter(nn.Module):
    """Adds the adapter's output to that of one linear.

    Args:
        linear: The base linear.
        rank: Width of the factors.
        scale: Factor s.
        dropout: Probability of a zero in the input.
    """

    def __init__(self, linear: Any, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.group, self.scale, self.is_column = linear.tp_group, scale, isinstance(linear, ColumnParallelLinear)
        size = self.group.size()
        shapes = ((rank // size, linear.input_size), (linear.output_size // size, rank))
        if not self.is_column:
            shapes = ((rank, linear.input_size // size), (linear.output_size // size, rank))
        self.a, self.b = (nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for shape in shapes)
        for factor in (self.a, self.b):
            factor.tensor_model_parallel, factor.allreduce = True, True  # type: ignore[attr-defined]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The adapter's output in the base's parallel state."""
        x = self.dropout(x)
        z = self._column(x) if self.is_column else self._row(x)
        return z * self.scale

    def _column(self, x: Tensor) -> Tensor:
        z = self._linear(x, self.a, sequence_parallel=True)
        z = mappings.all_gather_last_dim_from_tensor_parallel_region(z, group=self.group)
        return self._linear(z, self.b)

    def _row(self, x: Tensor) -> Tensor:
        z = tensor_parallel.reduce_from_tensor_model_parallel_region(self._linear(x, self.a), group=self.group)
        out = self._linear(tensor_parallel.copy_to_tensor_model_parallel_region(z, group=self.group), self.b)
        out = tensor_parallel.gather_from_tensor_model_parallel_region(out, group=self.group)
        return tensor_parallel.scatter_to_sequence_parallel_region(out, group=self.group)

    def _linear(self, x: Tensor, weight: Tensor, sequence_parallel: bool = False) -> Tensor:
        return linear_with_grad_accumulation_and_async_allreduce(
            x, weight, None, False, False, sequence_parallel, None, 0, self.group
        )


def apply_published(model: nn.Module, targets: tuple[str, ...], rank: int, scale: float, dropout: float) -> None:
    """Freeze a model and put a peer beside each target."""
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear) and name.rpartition(".")[2] in targets:
            linear.peer = PublishedAdapter(linear, rank, scale, dropout)
            linear.register_forward_hook(_add)


def remove_published(model: nn.Module) -> None:
    """Take the peers out."""
    for module in model.modules():
        if hasattr(module, "peer"):
            del module.peer
            module._forward_hooks.clear()


def _add(linear: Any, args: tuple[Tensor, ...], result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return result[0] + linear.peer(args[0]), result[1]


class PublishedExpertAdapter(nn.Module):
    """The published scheme beside one linear of an expert, at expert-tensor-parallel sizes above one.

    Every factor is sharded. Of ``linear_fc1`` z is gathered on rank, and its gradient reduce-scattered; of
    ``linear_fc2`` z is all-reduced, and so is its gradient, and this rank's rows of the output are set into zeros,
    which the dispatcher sums. Four collectives that block, for each expert and microbatch.

    Args:
        linear: The base linear.
        rank: Width of the factors.
        scale: Factor s.
    """

    def __init__(self, linear: Any, rank: int, scale: float) -> None:
        super().__init__()
        self.group, self.scale, self.is_column = linear.tp_group, scale, isinstance(linear, ColumnParallelLinear)
        size = self.group.size()
        a = (rank // size, linear.input_size) if self.is_column else (rank, linear.input_size // size)
        self.a, self.b = (
            nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for shape in (a, (linear.output_size // size, rank))
        )
        for factor in (self.a, self.b):
            factor.tensor_model_parallel, factor.allreduce = True, True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The adapter's output in the base's parallel state: of ``linear_fc2`` a part that is still to be summed."""
        z = nn.functional.linear(x, self.a)
        if self.is_column:
            z = mappings.all_gather_last_dim_from_tensor_parallel_region(z, group=self.group)
            return nn.functional.linear(z, self.b) * self.scale
        z = tensor_parallel.reduce_from_tensor_model_parallel_region(z, group=self.group)
        z = tensor_parallel.copy_to_tensor_model_parallel_region(z, group=self.group)
        rows = nn.functional.linear(z, self.b) * self.scale
        width, rank, size = rows.shape[-1], self.group.rank(), self.group.size()
        return nn.functional.pad(rows, (width * rank, width * (size - 1 - rank)))


def apply_published_experts(experts: nn.Module, rank: int, scale: float) -> None:
    """Put a peer beside each linear of frozen experts."""
    for linear in list(experts.modules()):
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
            linear.peer = PublishedExpertAdapter(linear, rank, scale)
            linear.register_forward_hook(_add)
