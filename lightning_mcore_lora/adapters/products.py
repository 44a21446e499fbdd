"""The adapter's two products, with what they keep for backward.

``down`` is ``z = A drop(x)``: it keeps the input itself or what the input can be computed from, and of dropout a seed.
``up`` adds ``B z`` in place to the base's output: one full-width temporary, none of it kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.gemm import Sizes, add_times, outer, times


@dataclass(frozen=True)
class Source:
    """What an adapter's input can be computed from, without a GEMM or a collective.

    Args:
        compute: Gives the input.
        tensors: Its arguments, which others keep for backward anyway.
    """

    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Dropout:
    """One draw of a mask, as its seed. What is kept of the input is not scaled: ``1 / (1 - p)`` is left to the caller.

    Args:
        p: Probability of a zero.
        seed: Below 2**32.
    """

    p: float
    seed: int

    @classmethod
    def draw(
        cls, p: float, number: int, group: ProcessGroup | None = None, device: torch.device | None = None
    ) -> "Dropout":
        """Take a seed from torch's default CPU stream, which tensor-parallel peers share and recompute replays.

        Args:
            p: Probability of a zero.
            number: Peers of different numbers get different masks.
            group: Peers that do not share the stream but must agree: they take the first one's draw, one small
                broadcast in each forward.
            device: Where the group's collectives run.
        """
        drawn = torch.randint(2**32, ())
        if group is not None:
            drawn = drawn.to(device)
            torch.distributed.broadcast(drawn, group=group, group_src=0)
        return cls(p, (int(drawn) + 0x9E3779B1 * number) % 2**32)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` with the mask's zeros."""
        generator = torch.Generator(x.device).manual_seed(self.seed)
        return x * torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(
            1 - self.p, generator=generator
        )


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout) -> Tensor:
        ctx.dropout = dropout
        return dropout(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.dropout(grad), None


def drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Apply a mask of which backward keeps the seed."""
    return _Drop.apply(x, dropout)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, dtype: torch.dtype, source: Source | None, dropout: Dropout | None, sizes: Sizes
    ) -> Tensor:
        ctx.dtypes, ctx.dropout, ctx.compute = (x.dtype, dtype), dropout, source.compute if source else None
        ctx.sizes = sizes
        cast = x.to(dtype)
        kept: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            kept = source.tensors if source else (cast,)
        ctx.save_for_backward(a, *kept)
        return times(dropout(cast) if dropout else cast, a.to(dtype), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        a, *kept = ctx.saved_tensors
        (x_dtype, dtype), dropout = ctx.dtypes, ctx.dropout
        dx = da = None
        if ctx.needs_input_grad[0]:
            dx = times(dz, a.to(dtype).mT, ctx.sizes)
            dx = (dropout(dx) if dropout else dx).to(x_dtype)
        if ctx.needs_input_grad[1]:
            x = ctx.compute(*kept).to(dtype) if ctx.compute else kept[0]
            x = dropout(x) if dropout else x
            da = outer(dz, x, a, ctx.sizes).to(a.dtype)
        return dx, da, None, None, None, None


def down(
    x: Tensor,
    a: Tensor,
    dtype: torch.dtype,
    source: Source | None = None,
    dropout: Dropout | None = None,
    sizes: Sizes = None,
) -> Tensor:
    """``drop(x) @ a.T``.

    Args:
        x: ``[..., d_in]``.
        a: ``[rank, d_in]``, or ``[experts, rank, d_in]``.
        dtype: Dtype of the product.
        source: What to keep in place of ``x``; ``None`` keeps ``x``. Nothing is kept if ``a`` is frozen.
        dropout: Mask of ``x``.
        sizes: Tokens of each expert, in whose order ``x`` is.

    Returns:
        ``[..., rank]``.
    """
    return _Down.apply(x, a, dtype, source, dropout, sizes)


@dataclass(frozen=True)
class Blocks:
    """Which part of z each output row reads, where several factors A are stacked.

    Args:
        rows: ``[d_out]``, the number of the part.
        count: Number of parts.
    """

    rows: Tensor
    count: int

    def _mask(self, like: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(self.rows, self.count).to(like.dtype)[:, :, None]

    def expand(self, b: Tensor) -> Tensor:
        """``[..., d_out, rank]`` to ``[..., d_out, parts * rank]``, zero where a row does not read."""
        return (b[..., None, :] * self._mask(b)).flatten(-2)

    def contract(self, b: Tensor) -> Tensor:
        """The gradient's way back."""
        return (b.unflatten(-1, (self.count, -1)) * self._mask(b)).sum(-2)


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, z: Tensor, b: Tensor, blocks: Blocks | None, sizes: Sizes) -> Tensor:
        ctx.blocks, ctx.sizes = blocks, sizes
        ctx.save_for_backward(z, b)
        ctx.mark_dirty(output)
        whole = (blocks.expand(b) if blocks else b).to(output.dtype)
        add_times(output, z.to(output.dtype), whole, sizes)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, b = ctx.saved_tensors
        dz = db = None
        if ctx.needs_input_grad[1]:
            whole = (ctx.blocks.expand(b) if ctx.blocks else b).to(grad.dtype)
            dz = times(grad, whole.mT, ctx.sizes).to(z.dtype)
        if ctx.needs_input_grad[2]:
            db = outer(grad, z.to(grad.dtype), b, ctx.sizes)
            db = (ctx.blocks.contract(db) if ctx.blocks else db).to(b.dtype)
        return grad, dz, db, None, None


def up(output: Tensor, z: Tensor, b: Tensor, blocks: Blocks | None = None, sizes: Sizes = None) -> Tensor:
    """Add ``z @ b.T`` to ``output``, in place where autograd allows it.

    Args:
        output: ``[..., d_out]``; not to be used afterwards.
        z: ``[..., rank]``, or ``[..., parts * rank]`` with ``blocks``.
        b: ``[d_out, rank]``, or ``[experts, d_out, rank]``.
        blocks: Where the rows read different parts of z.
        sizes: Tokens of each expert, in whose order ``output`` is.
    """
    # A one-process reduction returns its input as a view, which autograd does not let change.
    if output._is_view() or not output.is_contiguous():
        output = output.clone(memory_format=torch.contiguous_format)
    return _Up.apply(output, z, b, blocks, sizes)
