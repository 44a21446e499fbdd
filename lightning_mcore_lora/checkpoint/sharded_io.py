"""Sharded tensors to and from a directory, through Megatron-Core's ``dist_checkpointing``, without executing pickles.

Its strategies are called, and not its ``save`` and ``load``: what is common to all ranks goes to one place in 0.16 and
to another in 0.19, and each reads its own only.
"""

import io
import logging
import pickle
import queue
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_mcore_lora.checkpoint.errors import CheckpointError, reason, together

_METADATA = ".metadata"
_FORMAT = ("torch_dist", 1)

#: What ``.metadata`` may name: plain data classes, enumerations and dtypes.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}


def write(shards: dict[str, ShardedTensor], directory: Path, what: str) -> None:
    """Write every rank's parts. A collective over all processes.

    Raises:
        CheckpointError: On every rank.
    """
    everyone = determine_global_metadata(shards)[1]
    with together(what):
        validate_sharding_integrity(everyone)  # by rank zero, which raises alone
    failures: list[OSError] = []
    with _writing_here(failures):
        try:
            torch_strategy.TorchDistSaveShardedStrategy(*_FORMAT, thread_count=1).save(shards, directory)
        except CheckpointException as error:  # on every rank, with the reasons on rank zero
            failures += [OSError(reason(failure[0])) for failure in error.failures.values()]
            failures = failures or [OSError("another rank could not write its part")]
    with together(what):
        if failures:
            raise failures[0]


def write_config(directory: Path) -> None:
    """Write what tells Megatron-Core that the directory is a checkpoint of its."""
    save_config(CheckpointingConfig(*_FORMAT), str(directory))


def read(shards: dict[str, ShardedTensor], directory: Path, metadata: Metadata) -> None:
    """Fill the tensors of the parts. A collective over all processes."""
    strategy = torch_strategy.TorchDistLoadShardedStrategy()
    before = torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = lambda *_, **__: _Reader(directory, metadata)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the name by which Megatron-Core calls torch
            strategy.load(dict(shards), directory)
    except CheckpointException as error:  # on every rank
        raise CheckpointError(f"cannot load {directory}: {reason(next(iter(error.failures.values()))[0])}") from error
    finally:
        torch_strategy._get_filesystem_reader = before


def read_metadata(directory: Path, files: Collection[str]) -> Metadata:
    """Which tensors a checkpoint holds, and in which of its files.

    Args:
        directory: The checkpoint.
        files: Names of its files.

    Raises:
        CheckpointError: If it names what it should not: a function to be called, or a file elsewhere.
    """
    try:
        metadata = _Unpickler(io.BytesIO((directory / _METADATA).read_bytes())).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{_METADATA} cannot be read: {error}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{_METADATA} is not the metadata of a checkpoint")
    outside = {info.relative_path for info in (metadata.storage_data or {}).values()} - set(files)
    if outside:
        raise CheckpointError(f"{_METADATA} names files that are not the checkpoint's: {sorted(outside)[:3]}")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(f"{_METADATA} names {module}.{name}, which no checkpoint needs: it was tampered with")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Has read the metadata already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@contextmanager
def _writing_here(failures: list[OSError]) -> Iterator[None]:
    """Have Megatron-Core's writer work in this process, and not raise on rank zero alone.

    It hands its results over through a manager process, which outlives a killed run; and in 0.16 it forks to write, and
    waits for ever if the child is killed. Only an asynchronous save needs either.

    Args:
        failures: Gets what went wrong when rank zero wrote the metadata, while others wait for its word.
    """
    writer, logger = filesystem_async.FileSystemWriterAsync, logging.getLogger(torch_strategy.__name__)
    finish, results, level = writer.finish, filesystem_async._results_queue, logger.level
    forks = "write_preloaded_data_multiproc"
    forking = vars(writer).get(forks)

    def finish_quietly(self: Any, *args: Any) -> None:
        try:
            finish(self, *args)
        except OSError as error:
            failures.append(error)

    writer.finish = finish_quietly
    filesystem_async._results_queue = queue.Queue()
    logger.setLevel(logging.ERROR)  # 0.19 says at each save that its writer will go one day
    if forking is not None:
        setattr(writer, forks, staticmethod(_write_here))
    try:
        yield
    finally:
        writer.finish, filesystem_async._results_queue = finish, results
        logger.setLevel(level)
        if forking is not None:
            setattr(writer, forks, forking)


def _write_here(transforms: list, use_msc: bool, rank: int, buckets: list, results: queue.Queue) -> None:
    written: dict[int, Any] = {}
    for i, bucket in enumerate(buckets):
        own: queue.Queue = queue.Queue()
        done: queue.Queue = queue.Queue()
        done.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, i, bucket, own, done, use_fsync=True)
        _, written[i] = own.get()
    failed = [result for result in written.values() if isinstance(result, Exception)]
    results.put(failed[0] if failed else written)
