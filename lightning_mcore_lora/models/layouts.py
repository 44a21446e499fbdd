"""How Megatron-Core's parameters and Hugging Face tensors are made of each other.

A layout cuts one rank's part from whole Hugging Face tensors, and takes a whole Megatron-Core parameter apart into
them. Cutting reads only the slices that the rank keeps: a source is anything with ``shape`` and slicing that reads on
demand, such as what ``safetensors.safe_open(...).get_slice`` gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Which part to cut.

    Args:
        rank: Rank in the tensor-parallel group.
        size: Size of the group.
        query_groups: Key-value heads of the whole model.
        expert: Number of the expert over all ranks, where one tensor holds all experts.
        rows: Rows of a vocabulary that this rank holds, padding among them.
    """

    rank: int
    size: int
    query_groups: int
    expert: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model.

    Args:
        groups: Key-value heads.
        width: Width of a head.
    """

    groups: int
    width: int


class Source(Protocol):
    """A whole tensor: one in memory, or a :class:`Slice`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part."""


class Slice:
    """A tensor on disk with its shape at hand."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.shape: tuple[int, ...] = tuple(reader.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        return self._reader[index]


@dataclass(frozen=True)
class Layout:
    """One way.

    Args:
        cut: Makes one rank's part.
        split: Takes a whole parameter apart into whole Hugging Face tensors; ``None`` if one of theirs holds all
            experts.
        packed: Whether one Hugging Face tensor holds all experts, with the input dimension before the output's.
        interleaved: Whether gate and up take turns in a tensor's output rows, where Megatron-Core has them in halves.
    """

    cut: Callable[[Sequence[Source], Shard], Tensor]
    split: Callable[[Tensor, Heads], list[Tensor]] | None
    packed: bool = False
    interleaved: bool = False


def _part(length: int, shard: Shard) -> slice:
    each = length // shard.size
    return slice(shard.rank * each, (shard.rank + 1) * each)


def _cut_rows(sources: Sequence[Source], shard: Shard) -> Tensor:
    return sources[0][_part(sources[0].shape[0], shard)]


def _cut_vocabulary(sources: Sequence[Source], shard: Shard) -> Tensor:
    part = sources[0][shard.rank * shard.rows : (shard.rank + 1) * shard.rows]
    missing = shard.rows - part.shape[0]
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def _cut_gate_up(sources: Sequence[Source], shard: Shard) -> Tensor:
    return torch.cat([_cut_rows([source], shard) for source in sources])


def _cut_qkv(sources: Sequence[Source], shard: Shard) -> Tensor:
    groups = shard.query_groups // shard.size
    parts = [_cut_rows([source], shard).unflatten(0, (groups, -1)) for source in sources]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _split_qkv(whole: Tensor, heads: Heads) -> list[Tensor]:
    blocks = whole.unflatten(0, (heads.groups, -1))
    queries = blocks.shape[1] - 2 * heads.width
    return [part.flatten(0, 1) for part in blocks.split([queries, heads.width, heads.width], dim=1)]


def _cut_packed_gate_up(sources: Sequence[Source], shard: Shard) -> Tensor:
    """Gate and up take turns in the last dimension of ``[experts, hidden, 2 * ffn]``, or of the bias."""
    source = sources[0]
    part = _part(source.shape[-1] // 2, shard)
    columns = slice(2 * part.start, 2 * part.stop)
    values = (
        source[shard.expert, columns] if len(source.shape) == 2 else source[shard.expert, :, columns].transpose(0, 1)
    )
    return torch.cat([values[0::2], values[1::2]])


def _cut_packed_down(sources: Sequence[Source], shard: Shard) -> Tensor:
    source = sources[0]
    if len(source.shape) == 2:
        return source[shard.expert]
    return source[shard.expert, _part(source.shape[1], shard)].transpose(0, 1)


#: The whole tensor on every rank.
replicated = Layout(lambda sources, shard: sources[0][:], lambda whole, heads: [whole])
#: Sharded on the output dimension: ``[out / TP, in]``.
rows = Layout(_cut_rows, lambda whole, heads: [whole])
#: The same, with rows of zeros at the end, for a vocabulary that is padded.
vocabulary = Layout(_cut_vocabulary, lambda whole, heads: [whole])
#: Sharded on the input dimension: ``[out, in / TP]``.
columns = Layout(lambda sources, shard: sources[0][:, _part(sources[0].shape[1], shard)], lambda whole, heads: [whole])
#: Gate rows, then up rows, of this shard: ``[2 * ffn / TP, hidden]``.
gate_up = Layout(_cut_gate_up, lambda whole, heads: list(whole.chunk(2)))
#: For each query group of this shard its query heads, its key head, its value head:
#: ``[(heads + 2 * groups) / TP * head_dim, hidden]``.
qkv = Layout(_cut_qkv, _split_qkv)
#: The same as ``gate_up`` and ``columns``, of one expert in tensors that hold all.
packed_gate_up = Layout(_cut_packed_gate_up, None, packed=True, interleaved=True)
packed_down = Layout(_cut_packed_down, None, packed=True)
