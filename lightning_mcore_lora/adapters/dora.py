r"""Row norms of the adapted weight :math:`W + s B A`, for DoRA, without forming :math:`B A`."""

from typing import Any

import torch
from torch import Tensor

from lightning_mcore_lora.adapters.placement import Factor, Placement
from lightning_mcore_lora.adapters.sites import Site


class RowNorms:
    r"""Euclidean norms of the rows of :math:`W + s B A`, for this rank's rows.

    .. math:: \|W_i + s B_i A\|^2 = \|W_i\|^2 + 2 s\, B_i (W_i A^T)^T + s^2 B_i (A A^T) B_i^T

    Where d_in is sharded each term is a sum over the shards: one all-reduce of ``[d_out]`` over the site's group. Where
    A is sharded on rank it is gathered first, rank-sized.

    To be called without grad: the norm is taken as a constant.

    Args:
        site: The linear.
        placement: How its factors are held.
    """

    def __init__(self, site: Site, placement: Placement) -> None:
        self._linear = site.linear
        self._group = site.group
        self._placement = placement
        self._squares: tuple[Any, Tensor] | None = None

    def __call__(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """The norms.

        Args:
            a: This rank's A.
            b: This rank's B, as wide as the whole A is high.
            scale: Factor s.

        Returns:
            ``[d_out]`` or this rank's shard of it, in float32 (float64 if the weight is).
        """
        weight = self._linear.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = a.to(dtype), b.to(dtype)
        if self._placement.a is Factor.RANK and self._group.size() > 1:
            whole = a.new_empty(a.shape[0] * self._group.size(), a.shape[1])
            torch.distributed.all_gather_into_tensor(whole, a.contiguous(), group=self._group)
            a = whole
        cross = (weight @ a.to(weight.dtype).T).to(dtype)
        norms = self._weight_squares(dtype) + ((2 * scale * cross + scale**2 * b @ (a @ a.T)) * b).sum(1)
        if self._placement.a is Factor.INPUT and self._group.size() > 1:
            torch.distributed.all_reduce(norms, group=self._group)
        # Rounding may take a row that cancels below zero; one that is zero stays so, whatever it is divided by.
        return norms.clamp_min(0).sqrt().masked_fill(norms <= 0, 1.0)

    def _weight_squares(self, dtype: torch.dtype) -> Tensor:
        weight = self._linear.weight
        key = (weight.data_ptr(), weight._version, dtype)
        if self._squares is None or self._squares[0] != key:
            self._squares = key, torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        return self._squares[1]
