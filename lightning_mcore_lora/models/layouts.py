"""How one rank's part of a Megatron-Core parameter is cut from whole Hugging Face tensors.

Each layout reads only the slices that the rank keeps. A source is anything with ``shape`` and slicing that reads on
demand, such as what ``safetensors.safe_open(...).get_slice`` gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shard:
    """Which part to cut.

    Args:
        rank: Rank in the tensor-parallel group.
        size: Size of the group.
        query_groups: Key-value heads of the whole model.
    """

    rank: int
    size: int
    query_groups: int


class Slice:
    """A tensor on disk with its shape at hand."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.shape: tuple[int, ...] = tuple(reader.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._reader[index]


Layout = Callable[[Sequence[Slice], Shard], torch.Tensor]


def _part(length: int, shard: Shard) -> slice:
    each = length // shard.size
    return slice(shard.rank * each, (shard.rank + 1) * each)


def replicated(sources: Sequence[Slice], shard: Shard) -> torch.Tensor:
    """The whole tensor on every rank."""
    return sources[0][:]


def rows(sources: Sequence[Slice], shard: Shard) -> torch.Tensor:
    """Sharded on the output dimension: ``[out / TP, in]``."""
    return sources[0][_part(sources[0].shape[0], shard)]


def columns(sources: Sequence[Slice], shard: Shard) -> torch.Tensor:
    """Sharded on the input dimension: ``[out, in / TP]``."""
    return sources[0][:, _part(sources[0].shape[1], shard)]


def gate_up(sources: Sequence[Slice], shard: Shard) -> torch.Tensor:
    """Gate rows, then up rows, of this shard: ``[2 * ffn / TP, hidden]``."""
    return torch.cat([rows([source], shard) for source in sources])


def qkv(sources: Sequence[Slice], shard: Shard) -> torch.Tensor:
    """For each query group of this shard its query heads, its key head, its value head.

    Returns:
        ``[(heads + 2 * groups) / TP * head_dim, hidden]``.
    """
    groups = shard.query_groups // shard.size
    parts = [rows([source], shard).unflatten(0, (groups, -1)) for source in sources]
    return torch.cat(parts, dim=1).flatten(0, 1)
