r"""Row norms of the adapted weight :math:`W + s B A`, for DoRA, without forming :math:`B A`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mcore_lora.adapters.placement import Factor, Placement
from lightning_mcore_lora.adapters.sites import Site


class RowNorms:
    r"""Euclidean norms of the rows of :math:`W + s B A`, for this rank's rows; of experts each one's.

    .. math:: \|W_i + s B_i A\|^2 = \|W_i\|^2 + 2 s\, B_i (W_i A^T)^T + s^2 B_i (A A^T) B_i^T

    Where d_in is sharded each term is a sum over the shards: one all-reduce of ``[d_out]``, or ``[experts, d_out]``,
    over the site's group. Where A is sharded on rank it is gathered first, rank-sized.

    To be called without grad: the norm is taken as a constant.

    Args:
        site: The linear.
        placement: How its factors are held.
    """

    def __init__(self, site: Site, placement: Placement) -> None:
        self._site = site
        self._placement = placement
        self._squares: dict[int, tuple[Any, Tensor]] = {}

    def __call__(self, a: Sequence[Tensor], b: Sequence[Tensor], scale: float) -> Tensor:
        """The norms.

        Args:
            a: This rank's A of each weight.
            b: This rank's B of each, as wide as the whole A is high.
            scale: Factor s.

        Returns:
            ``[weights, d_out]`` or this rank's shard of it, in float32 (float64 if the weight is).
        """
        weights = self._site.weights()
        squares = torch.stack([self._of(i, *each, scale) for i, each in enumerate(zip(weights, a, b, strict=True))])
        if self._placement.a is Factor.INPUT and self._site.group.size() > 1:
            torch.distributed.all_reduce(squares, group=self._site.group)
        # Rounding may take a row that cancels below zero; one that is zero stays so, whatever it is divided by.
        return squares.clamp_min(0).sqrt().masked_fill(squares <= 0, 1.0)

    def _of(self, number: int, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Squares of one weight's norms, of this rank's part of d_in."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = gathered(a.to(dtype), self._placement, self._site), b.to(dtype)
        cross = (weight @ a.to(weight.dtype).T).to(dtype)
        return self._weight_squares(number, weight, dtype) + ((2 * scale * cross + scale**2 * b @ (a @ a.T)) * b).sum(1)

    def _weight_squares(self, number: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (weight.data_ptr(), weight._version, dtype)
        if self._squares.get(number, (None,))[0] != key:
            self._squares[number] = key, torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        return self._squares[number][1]


def gathered(a: Tensor, placement: Placement, site: Site) -> Tensor:
    """A over all of its rank: gathered over the site's group where it is sharded on it."""
    if placement.a is not Factor.RANK or site.group.size() == 1:
        return a
    whole = a.new_empty(a.shape[0] * site.group.size(), a.shape[1])
    torch.distributed.all_gather_into_tensor(whole, a.contiguous(), group=site.group)
    return whole
