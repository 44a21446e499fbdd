"""Where each local tensor lies in the whole one, by the marks of its parameter; names that all layouts share."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from lightning_mcore_lora.parallel import Experts, ParallelContext

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def is_numbered_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert, which its name tells from the others."""
    return bool(_EXPERT.search(name))


def of_any_expert(name: str) -> str:
    """The name without the expert's number: ranks hold different experts, and all have the same parameters."""
    return _EXPERT.sub(".local_experts.*.", name)


class Shards:
    """The tensors of one module on this rank.

    Args:
        parameters: By name, those whose marks say how they are split, and those that are not split.
        parallel: The layout.
        base: The path of the base model here, and where the checkpoint has it: in a LightningModule and alone the same
            model has names that begin differently.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        parallel: ParallelContext,
        base: tuple[str | None, str | None] = (None, None),
    ) -> None:
        self._parameters = parameters
        self._parallel = parallel
        here, there = (None if path is None else f"{path}." if path else "" for path in base)
        self._base = None if here is None or there is None else (here, there)
        experts = [int(match[1]) for match in map(_EXPERT.search, parameters) if match]
        self._first_expert = (max(experts) + 1) * parallel.ep_rank if experts else 0

    def whole_name(self, name: str) -> str:
        """The name in a checkpoint: with the expert's number over all ranks."""
        if self._base is not None and name.startswith(self._base[0]):
            name = self._base[1] + name.removeprefix(self._base[0])
        return _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + self._first_expert}.", name)

    def keys(self, prefix: str, name: str) -> list[str]:
        """The keys in a checkpoint under which a tensor like the parameter is kept."""
        key, count = f"{prefix}.{self.whole_name(name)}", self._stride(name)
        return [key] if count == 1 else [f"{key}.{i}" for i in range(count)]

    def parts(self, prefix: str, values: Mapping[str, Tensor]) -> Iterator[ShardedTensor]:
        """Tensors like parameters, as parts of whole ones; blocks that lie apart in it, gate and up, are apart.

        Args:
            prefix: Tells what the tensors are: the weights, or one of the optimizer's states.
            values: By the parameter's name; the parts are views of them.
        """
        for name, value in values.items():
            if self.is_empty(name):
                continue
            count = self._stride(name)
            blocks = [value] if count == 1 else value.chunk(count, self._parameters[name].partition_dim)  # type: ignore[attr-defined]
            for key, block in zip(self.keys(prefix, name), blocks, strict=True):
                yield self._part(key, name, block.detach())

    def is_empty(self, name: str) -> bool:
        """Whether there is nothing to keep of a tensor."""
        return self._parameters[name].numel() == 0

    def _stride(self, name: str) -> int:
        return getattr(self._parameters[name], "partition_stride", 1)

    def _part(self, key: str, name: str, block: Tensor) -> ShardedTensor:
        parameter: Any = self._parameters[name]
        parallel = self._parallel
        rank, size, copy = parallel.tp_rank, parallel.sizes.tensor, parallel.dp_rank
        held = getattr(parameter, "experts", None)
        if held or is_numbered_expert(name):
            rank, size, copy = parallel.etp_rank, parallel.sizes.expert_tensor, parallel.expert_dp_rank
        sharded = getattr(parameter, "tensor_model_parallel", False)
        offsets = [(parameter.partition_dim, rank, size)] if sharded else []
        if held is Experts.EACH:
            offsets.append((0, parallel.ep_rank, parallel.sizes.expert))
        elif held is Experts.ALL:
            copy += parallel.ep_rank * parallel.sizes.world_size
        return ShardedTensor.from_rank_offsets(
            key,
            block,
            *offsets,
            replica_id=(0, 0 if sharded else rank, copy),
            allow_shape_mismatch=getattr(parameter, "is_vocabulary", False),
        )


def row(key: str, value: Tensor, index: int, count: int) -> ShardedTensor:
    """A ``[1, n]`` tensor as one of ``count`` rows."""
    return ShardedTensor.from_rank_offsets(key, value, (0, index, count))


def by_key(parts: Iterable[ShardedTensor]) -> dict[str, ShardedTensor]:
    """The parts by their keys."""
    return {part.key: part for part in parts}
