"""Checkpoints through Megatron-Core's ``dist_checkpointing``: a directory with every trainable parameter and its state.

A parameter's marks (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``) say where its shard lies in
the whole tensor, so files hold whole logical tensors. Frozen weights are not saved. What belongs to one process, its
random streams, is saved by rank.
"""

import json
import queue
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mcore_lora.parallel import Experts, ParallelContext

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_SHARDED = "<sharded>"
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or does not fit the run that reads it."""


@dataclass
class Loaded:
    """What a checkpoint held.

    Args:
        rest: What was saved beside the tensors.
        weights: Name to this rank's float32 value of each parameter.
        optimizer_states: A ``state_dict`` of each optimizer; empty if none was saved, or asked for.
        random_state: This process's random streams.
    """

    rest: dict[str, Any]
    weights: dict[str, Tensor]
    optimizer_states: list[dict[str, Any]]
    random_state: dict[str, Any]


def check_can_save(module: nn.Module) -> None:
    """Check that what is trainable has a place in a checkpoint.

    Raises:
        NotImplementedError: If experts are trainable whose weights are not told apart by name.
    """
    unnamed = [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and ".experts." in name and not hasattr(p, "experts") and not _EXPERT.search(name)
    ]
    if unnamed:
        raise NotImplementedError(
            f"training grouped expert weights is not supported yet, only SequentialMLP's: freeze {unnamed[:3]} ..."
        )


def save_checkpoint(
    path: str | Path,
    rest: dict[str, Any],
    parameters: dict[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    parallel: ParallelContext,
    random_state: dict[str, Any],
    left_out: Collection[str] = (),
) -> None:
    """Write a checkpoint directory. A collective over all processes.

    It is written beside its place and moved there when complete.

    Args:
        path: The directory to make; an existing one is replaced.
        rest: Plain data, the same on every rank; saved by rank zero.
        parameters: What is trained, by name; saved sharded, in float32.
        optimizers: Its optimizers; none to save weights only.
        parallel: The layout.
        random_state: This process's random streams.
        left_out: Names whose weights are not saved.

    Raises:
        CheckpointError: If the directory cannot be written, on every rank.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    weights = {name: p for name, p in parameters.items() if name not in left_out}
    shards = _shards("model", parameters, weights, parallel)
    states = []
    for i, optimizer in enumerate(optimizers):
        names = _names(optimizer, parameters)
        state = optimizer.state_dict()
        for name in sorted({key for entry in state["state"].values() for key in entry}):
            values = {
                names[index]: entry[name]
                for index, entry in state["state"].items()
                if _is_like(entry.get(name), parameters[names[index]])
            }
            shards |= _shards(f"optimizer.{i}.{name}", parameters, values, parallel)
        state["state"] = {
            index: {
                name: _SHARDED if _is_like(value, parameters[names[index]]) else value for name, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        states.append(state)
    _on_rank_zero(lambda: _make_empty(partial), f"cannot write {path}")
    content = {
        "shards": shards,
        "random": _per_rank("random", random_state, parallel),
        "rest": rest,
        "names": sorted(weights),
        "optimizers": states,
    }
    with _results_in_this_process():
        dist_checkpointing.save(content, str(partial))
    _on_rank_zero(lambda: _finish(partial, path, _manifest(parallel)), f"cannot write {path}")


def load_checkpoint(
    path: str | Path,
    parameters: dict[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    parallel: ParallelContext,
    strict: bool = True,
) -> Loaded:
    """Read a checkpoint directory for a module that has its adapters already. A collective over all processes.

    Args:
        path: The directory.
        parameters: What is trained, by name; not changed.
        optimizers: Its optimizers; empty to read weights only.
        parallel: The layout.
        strict: Whether the names must be the checkpoint's; otherwise those in both are read.

    Returns:
        What it held.

    Raises:
        CheckpointError: If it is no checkpoint, of another layout, or of other parameters.
    """
    path = Path(path)
    _check_manifest(path, parallel)
    common = load_common_state_dict(str(path))
    if strict:
        _check_names(path, common["names"], parameters)
    whole = {name: _like(p) for name, p in parameters.items() if name in common["names"]}
    wanted = {"model": whole}
    states = common["optimizers"] if optimizers else []
    for i, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        names = _names(optimizer, parameters)
        for index, entry in state["state"].items():
            for key in (key for key, value in entry.items() if isinstance(value, str) and value == _SHARDED):
                entry[key] = _like(parameters[names[index]])
                wanted.setdefault(f"optimizer.{i}.{key}", {})[names[index]] = entry[key]
    shards: dict[str, ShardedTensor] = {}
    for prefix, values in wanted.items():
        shards |= _shards(prefix, parameters, values, parallel)
    loaded = dist_checkpointing.load({"shards": shards, "random": _per_rank("random", None, parallel)}, str(path))
    with torch.no_grad():
        for prefix, values in wanted.items():
            for _, key, part in _blocks(prefix, parameters, values, parallel):
                part.copy_(loaded["shards"][key])
    return Loaded(common["rest"], whole, states, loaded["random"])


@contextmanager
def _results_in_this_process() -> Iterator[None]:
    """Have Megatron-Core's writer hand its results over in a plain queue.

    It starts a manager process for them, which only an asynchronous save needs, and which outlives a killed run.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _names(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> list[str]:
    """Name of each parameter in the order in which the optimizer's state numbers them."""
    by_id = {id(parameter): name for name, parameter in parameters.items()}
    return [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _like(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, dtype=torch.float32)


def _blocks(
    prefix: str, parameters: dict[str, nn.Parameter], values: dict[str, Any], parallel: ParallelContext
) -> Iterator[tuple[str, str, Tensor]]:
    """The local name, the key and the part of each block of a local tensor.

    Blocks that lie apart in the whole tensor, gate and up of a shard, are apart; experts are numbered over all ranks.
    """
    experts = [int(match[1]) for match in map(_EXPERT.search, parameters) if match]
    first = (max(experts) + 1) * parallel.ep_rank if experts else 0
    for name, value in values.items():
        key = _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + first}.", f"{prefix}.{name}")
        count = getattr(parameters[name], "partition_stride", 1)
        if count == 1:
            yield name, key, value.detach()
            continue
        for i, part in enumerate(value.detach().chunk(count, parameters[name].partition_dim)):  # type: ignore[attr-defined]
            yield name, f"{key}.{i}", part


def _shards(
    prefix: str, parameters: dict[str, nn.Parameter], values: dict[str, Any], parallel: ParallelContext
) -> dict[str, ShardedTensor]:
    shards = {}
    for name, key, part in _blocks(prefix, parameters, values, parallel):
        parameter = parameters[name]
        rank, size, copy = parallel.tp_rank, parallel.sizes.tensor, parallel.dp_rank
        held = getattr(parameter, "experts", None)
        if held or _EXPERT.search(name):
            rank, size, copy = parallel.etp_rank, parallel.sizes.expert_tensor, parallel.expert_dp_rank
        sharded = getattr(parameter, "tensor_model_parallel", False)
        offsets = [(parameter.partition_dim, rank, size)] if sharded else []  # type: ignore[attr-defined]
        if held is Experts.EACH:
            offsets.append((0, parallel.ep_rank, parallel.sizes.expert))
        elif held is Experts.ALL:
            copy += parallel.ep_rank * parallel.sizes.world_size
        replica = (0, 0 if sharded else rank, copy)
        shards[key] = ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=replica)
    return shards


def _per_rank(key: str, value: Any, parallel: ParallelContext) -> ShardedObject:
    return ShardedObject(key, value, (parallel.sizes.world_size,), (parallel.global_rank,), replica_id=0)


def _manifest(parallel: ParallelContext) -> dict[str, Any]:
    packages = ("lightning-mcore-lora", "lightning", "megatron-core", "torch")
    return {
        "format_version": FORMAT_VERSION,
        "layout": _layout(parallel),
        "packages": {name: version(name) for name in packages},
    }


def _layout(parallel: ParallelContext) -> dict[str, int]:
    sizes = parallel.sizes
    return {
        "world_size": sizes.world_size,
        "tensor_parallel_size": sizes.tensor,
        "expert_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
    }


def _check_manifest(path: Path, parallel: ParallelContext) -> None:
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint of this package: it has no {MANIFEST}")
    manifest = json.loads(file.read_text())
    if manifest["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version={manifest['format_version']}, this version reads up to {FORMAT_VERSION}: update"
        )
    if manifest["layout"] != _layout(parallel):
        raise CheckpointError(
            f"{path} was saved at {manifest['layout']}, this run is {_layout(parallel)}: resume at the same layout "
            "(other layouts are not supported yet)"
        )


def _check_names(path: Path, saved: Sequence[str], parameters: dict[str, nn.Parameter]) -> None:
    missing, unexpected = sorted(parameters.keys() - set(saved)), sorted(set(saved) - parameters.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"trainable parameters of {path} are not those of this run. Missing in the checkpoint: {missing[:5]}; "
            f"unexpected there: {unexpected[:5]}. Use the LoRA settings that it was saved with."
        )


def _make_empty(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _finish(partial: Path, path: Path, manifest: dict[str, Any]) -> None:
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if path.exists():
        old = path.with_name(path.name + ".replaced")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(path)


def _on_rank_zero(action: Callable[[], None], what: str) -> None:
    """Run on rank zero after everyone has come here; an error there is raised on every rank."""
    torch.distributed.barrier()
    failure: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = [str(error)]
    torch.distributed.broadcast_object_list(failure, src=0)
    if failure[0]:
        raise CheckpointError(f"{what}: {failure[0]}")
