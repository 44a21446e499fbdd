"""What belongs to one process: its random streams, and states of optimizers that no layout can share.

Each rank's is one row of a tensor of bytes, so that a run at another layout can read the rows that it has a use for.
"""

import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_mcore_lora.checkpoint.errors import CheckpointError, together
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes

KEY = "process"
_LENGTH = 8  # bytes that say how long the rest is
_TWISTER = 624  # numbers in the state of a Mersenne Twister


@dataclass
class ProcessState:
    """What a rank keeps for itself.

    Args:
        random: Its random streams.
        epochs: The random streams in which the epoch of each loader began.
        states: For each optimizer, parameter to the states of it that are neither numbers nor like the parameter.
    """

    random: dict[str, Any]
    epochs: list[dict[str, Any] | None]
    states: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)


def pack(state: ProcessState, what: str) -> Tensor:
    """One row ``[1, n]`` of bytes, as long on every rank. A collective over all processes.

    Raises:
        CheckpointError: On every rank, if it could not be read again.
    """
    stream = io.BytesIO()
    with together(what):
        torch.save(vars(state), stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    content = stream.getvalue()
    own = torch.frombuffer(bytearray(len(content).to_bytes(_LENGTH, "little") + content), dtype=torch.uint8)
    lengths: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lengths, len(own))
    row = own.new_zeros(1, max(lengths))
    row[0, : len(own)] = own
    return row


def unpack(row: Tensor) -> ProcessState:
    """What :func:`pack` packed; plain data and tensors only, no code is run.

    Raises:
        CheckpointError: If it holds a state that NumPy would take unchecked, and crash.
    """
    content = row.flatten().numpy().tobytes()
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    state = ProcessState(**torch.load(io.BytesIO(content[_LENGTH:end]), weights_only=True))
    for streams in (state.random, *filter(None, state.epochs)):
        kind, keys, position, *_ = streams["numpy"]
        if kind != "MT19937" or len(keys) != _TWISTER or not 0 <= position <= _TWISTER:
            raise CheckpointError("it holds no state of NumPy's random stream: it was tampered with")
    return state


@dataclass(frozen=True)
class Origin:
    """Whose row a rank reads at another layout.

    Args:
        rank: The rank that saved it.
        shared: Whether the streams that tensor-parallel peers share continue.
        own: Whether those of sharded regions continue too.
    """

    rank: int
    shared: bool
    own: bool


def origin(saved: ParallelSizes, parallel: ParallelContext) -> Origin:
    """Where this rank's streams come from.

    A data-parallel replica continues its own, which its tensor-parallel peers share. What is drawn for a shard of a
    tensor has no meaning at another tensor- or expert-parallel size: those streams begin anew, as does a replica that
    there was not.
    """
    now = parallel.sizes
    parts = ("tensor", "expert", "expert_tensor")
    same_parts = all(getattr(saved, name) == getattr(now, name) for name in parts)
    if parallel.dp_rank >= saved.data:
        return Origin(0, False, False)
    peer = parallel.tp_rank if same_parts else 0
    return Origin(parallel.dp_rank * saved.tensor + peer, True, same_parts)
