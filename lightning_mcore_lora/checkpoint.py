"""Checkpoints through Megatron-Core's ``dist_checkpointing``: a directory with every trainable parameter and its state.

A parameter's marks (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``) say where its shard lies in
the whole tensor, so files hold whole logical tensors. Frozen weights are not saved. What belongs to one process, its
random streams, is saved by rank.
"""

import json
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from lightning_mcore_lora.parallel import ParallelContext

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_SHARDED = "<sharded>"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or does not fit the run that reads it."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter of everything that a checkpoint holds."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def save_checkpoint(
    path: str | Path,
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    parallel: ParallelContext,
    random_state: dict[str, Any],
) -> None:
    """Write a checkpoint directory. A collective over all processes.

    It is written beside its place and moved there when complete.

    Args:
        path: The directory to make; an existing one is replaced.
        checkpoint: Lightning's checkpoint; its ``state_dict`` and ``optimizer_states`` are saved sharded, the rest, the
            same on every rank, by rank zero.
        module: The module whose trainable parameters are saved.
        optimizers: Its optimizers.
        parallel: The layout.
        random_state: This process's random streams.

    Raises:
        CheckpointError: If the directory cannot be written, on every rank.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    parameters = trainable(module)
    shards = dict(_shards("model", parameters, dict(parameters), parallel))
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    states = []
    for i, optimizer in enumerate(optimizers if "optimizer_states" in checkpoint else ()):
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
        "names": sorted(parameters),
        "optimizers": states,
    }
    with _results_in_this_process():
        dist_checkpointing.save(content, str(partial))
    _on_rank_zero(lambda: _finish(partial, path, _manifest(parallel)), f"cannot write {path}")


def load_checkpoint(
    path: str | Path, module: nn.Module, optimizers: Sequence[Optimizer], parallel: ParallelContext
) -> dict[str, Any]:
    """Read a checkpoint directory for a module that has its adapters already. A collective over all processes.

    Args:
        path: The directory.
        module: The module it will be loaded into.
        optimizers: Its optimizers; empty to read weights only.
        parallel: The layout.

    Returns:
        Lightning's checkpoint, with ``random_state`` beside it.

    Raises:
        CheckpointError: If it is no checkpoint, of another layout, or its trainable parameters are not the module's.
    """
    path = Path(path)
    _check_manifest(path, parallel)
    parameters = trainable(module)
    common = load_common_state_dict(str(path))
    _check_names(path, common["names"], parameters)
    whole = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
    wanted = {"model": whole}
    states = common["optimizers"] if optimizers else []
    for i, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        names = _names(optimizer, parameters)
        for index, entry in state["state"].items():
            for key in (key for key, value in entry.items() if isinstance(value, str) and value == _SHARDED):
                wanted.setdefault(f"optimizer.{i}.{key}", {})[names[index]] = entry[key] = torch.empty_like(
                    parameters[names[index]]
                )
    shards: dict[str, ShardedTensor] = {}
    for prefix, values in wanted.items():
        shards |= _shards(prefix, parameters, values, parallel)
    loaded = dist_checkpointing.load({"shards": shards, "random": _per_rank("random", None, parallel)}, str(path))
    with torch.no_grad():
        for prefix, values in wanted.items():
            for name, value in values.items():
                for key, part in _parts(prefix, name, parameters[name], value):
                    part.copy_(loaded["shards"][key])
    checkpoint = common["rest"] | {"state_dict": whole, "random_state": loaded["random"]}
    if common["optimizers"]:  # a checkpoint of weights only has none, and the trainer says so if it wants to resume
        checkpoint["optimizer_states"] = states
    return checkpoint


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


def _parts(prefix: str, name: str, parameter: nn.Parameter, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The blocks of a local tensor that lie apart in the whole one: gate and up of a shard."""
    count = getattr(parameter, "partition_stride", 1)
    if count == 1:
        yield f"{prefix}.{name}", value
        return
    for i, part in enumerate(value.chunk(count, parameter.partition_dim)):  # type: ignore[attr-defined]
        yield f"{prefix}.{name}.{i}", part


def _shards(
    prefix: str, parameters: dict[str, nn.Parameter], values: dict[str, Any], parallel: ParallelContext
) -> dict[str, ShardedTensor]:
    shards = {}
    for name, value in values.items():
        parameter = parameters[name]
        sharded = getattr(parameter, "tensor_model_parallel", False)
        offsets = [(parameter.partition_dim, parallel.tp_rank, parallel.sizes.tensor)] if sharded else []  # type: ignore[attr-defined]
        replica = (0, 0 if sharded else parallel.tp_rank, parallel.dp_rank)
        for key, part in _parts(prefix, name, parameter, value.detach()):
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
