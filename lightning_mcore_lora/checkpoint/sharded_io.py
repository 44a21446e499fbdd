"""Sharded tensors to and from a directory, through Megatron-Core's ``dist_checkpointing``, without executing pickles.

Its strategies are called, and not its ``save`` and ``load``: what is common to all ranks goes to one place in 0.16 and
to another in 0.19, and each reads its own only.
"""

import io
import logging
import math
import pickle
import queue
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_mcore_lora import cpu_backend
from lightning_mcore_lora.checkpoint.errors import CheckpointError, reason, together

METADATA = ".metadata"
_FORMAT = ("torch_dist", 1)
_WRITERS = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")  # of 0.16 and of 0.19

#: What ``.metadata`` names beside dtypes: data classes and enumerations, of which records take the place.
_RECORDS = {
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


class Writing:
    """Every rank's parts on their way to the disk. Its methods are collectives over all processes.

    Args:
        shards: The parts, by key.
        directory: Where to.
        what: What is done, for messages.
        in_background: Whether to return while another process writes what the tensors hold now.

    Raises:
        CheckpointError: On every rank.
    """

    def __init__(self, shards: dict[str, ShardedTensor], directory: Path, what: str, in_background: bool) -> None:
        everyone = determine_global_metadata(shards)[1]
        with together(what):
            validate_sharding_integrity(everyone)  # by rank zero, which raises alone
        self._what = what
        self._failures: list[OSError] = []
        self._calls: Any = None
        self._writer: Any = filesystem_async.FileSystemWriterAsync
        strategy = torch_strategy.TorchDistSaveShardedStrategy(*_FORMAT, thread_count=1)
        if in_background:
            queue_type, self._writer, settings = _asynchronous()
            with self._listening(), _changed(filesystem_async, _results_queue=_ResultsInFile()):
                request = strategy.async_save(shards, directory, **settings)
            self._check()
            with cpu_backend.active():
                self._calls = queue_type()
                self._calls.schedule_async_request(request)
        else:
            with self._listening(), _writing_here():
                strategy.save(shards, directory)
            self._check()

    def is_done(self, wait: bool = False) -> bool:
        """Whether every rank has written its parts.

        Raises:
            CheckpointError: On every rank, if one could not.
        """
        if self._calls is not None:
            with self._listening():
                self._calls.maybe_finalize_async_calls(blocking=wait)
                if self._calls.get_num_unfinalized_calls():
                    return False
            self._calls = None
            self._check()
        return True

    def _check(self) -> None:
        with together(self._what):
            if self._failures:
                raise self._failures[0]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Keep what went wrong, so that all ranks hear of it.

        Megatron-Core raises on every rank, with the reasons on rank zero alone, if parts cannot be written; and on rank
        zero alone, while the others wait for its word, if the metadata cannot.
        """
        finish = self._writer.finish

        def finish_quietly(writer: Any, *args: Any) -> None:
            try:
                finish(writer, *args)
            except OSError as error:
                self._failures.append(error)

        with cpu_backend.active(), _changed(self._writer, finish=finish_quietly):
            try:
                yield
            except CheckpointException as error:
                if self._calls is not None:
                    self._calls.async_calls.clear()
                self._failures += [OSError(reason(failure[0])) for failure in error.failures.values()]
                self._failures = self._failures or [OSError("another rank could not write its part")]


def write_config(directory: Path) -> None:
    """Write what tells Megatron-Core that the directory is a checkpoint of its."""
    save_config(CheckpointingConfig(*_FORMAT), str(directory))


def read(shards: dict[str, ShardedTensor], directory: Path, metadata: Metadata) -> None:
    """Fill the tensors of the parts. A collective over all processes.

    Raises:
        CheckpointError: On every rank, if one cannot read.
    """
    strategy = torch_strategy.TorchDistLoadShardedStrategy()
    failure: BaseException | None = None
    with (
        cpu_backend.active(),
        _changed(torch_strategy, _get_filesystem_reader=lambda *_, **__: _Reader(directory, metadata)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # of the name by which Megatron-Core calls torch
        try:
            strategy.load(dict(shards), directory)
        except CheckpointException as error:  # in 0.16 on every rank, in 0.19 where it happened
            failure = next(iter(error.failures.values()))[0]
    with together(f"cannot load {directory}"):
        if failure is not None:
            raise failure


def read_metadata(directory: Path, files: Collection[str]) -> Metadata:
    """Which tensors a checkpoint holds, and in which of its files.

    None of the objects that the file describes is made: its values are copied, each of the type that it must have.

    Args:
        directory: The checkpoint.
        files: Names of its files.

    Raises:
        CheckpointError: If it names what it should not: a function to be called, or a file elsewhere.
    """
    try:
        found = _Unpickler(io.BytesIO((directory / METADATA).read_bytes())).load()
        tensors: dict[str, Any] = {
            _of_type(key, str): _tensor(item)
            for key, item in _items(found.state["state_dict_metadata"])
            if type(item).__name__ == "TensorStorageMetadata"
        }
        storage = {
            MetadataIndex(_of_type(index.state["fqn"], str), _size(index.state["offset"])): info
            for index, item in _items(found.state["storage_data"])
            if index.state["fqn"] in tensors and (info := _info(item))
        }
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{METADATA} cannot be read: {error}") from None
    outside = {info.relative_path for info in storage.values()} - set(files)
    if outside:
        raise CheckpointError(f"{METADATA} names files that are not the checkpoint's: {sorted(outside)[:3]}")
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


class _Record:
    """Stands for an object of any class: keeps what it was made of, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"{METADATA} names {module}.{name}, which no checkpoint needs: it was tampered with")


def _items(found: Any) -> Any:
    return _of_type(found, dict).items()


def _of_type(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise CheckpointError(f"{METADATA} holds a {type(found).__name__} for a {kind.__name__}: it was tampered with")
    return found


def _size(found: Any) -> torch.Size:
    return torch.Size(found or ())


def _tensor(item: Any) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(_size(c.state["offsets"]), _size(c.state["sizes"])) for c in item.state["chunks"]]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(_size(item.state["size"])):
        raise CheckpointError(f"{METADATA} has tensors of which parts are missing")
    properties = TensorProperties(dtype=item.state["properties"].state[0])
    return TensorStorageMetadata(properties, _size(item.state["size"]), chunks)


def _info(item: Any) -> _StorageInfo:
    return _StorageInfo(
        _of_type(item.state["relative_path"], str), int(item.state["offset"]), int(item.state["length"])
    )


class _Reader(FileSystemReader):
    """Has read the metadata already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or class, for a while."""
    before = {name: vars(owner)[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _writing_here() -> Iterator[None]:
    """Have Megatron-Core's writer work in this process, where nothing is to go on meanwhile.

    It hands its results over through a manager process, which outlives a killed run. In 0.16 it forks to write, and
    waits for ever if the child is killed; in 0.19 it keeps to itself what the system said.
    """
    logger, writer = logging.getLogger(torch_strategy.__name__), filesystem_async.FileSystemWriterAsync
    level = logger.level
    logger.setLevel(logging.ERROR)  # 0.19 says at each save that its writer will go one day
    own = {name: staticmethod(_write_here) for name in _WRITERS if hasattr(writer, name)}
    try:
        with _changed(filesystem_async, _results_queue=queue.Queue()), _changed(writer, **own):
            yield
    finally:
        logger.setLevel(level)


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


class _ResultsInFile:
    """Takes what the process that writes has to say, and needs no process of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="checkpoint-")
        self._file = Path(self._folder.name) / "results"

    def put(self, results: Any) -> None:
        self._file.write_bytes(pickle.dumps(results))

    def get_nowait(self) -> Any:
        if not self._file.exists():
            raise queue.Empty
        results = pickle.loads(self._file.read_bytes())
        self._folder.cleanup()
        return results


def _asynchronous() -> tuple[Any, Any, dict[str, str]]:
    """Who writes in the background: NVIDIA's resiliency extension from 0.19 on, or Megatron-Core's own."""
    choose = getattr(torch_strategy, "get_async_strategy", None)
    if choose is None:
        return AsyncCallsQueue, filesystem_async.FileSystemWriterAsync, {}
    name = "nvrx" if torch_strategy.HAVE_NVRX else "mcore"
    modules = choose(name)[1]
    return modules["AsyncCallsQueue"], modules["FileSystemWriterAsync"], {"async_strategy": name}
