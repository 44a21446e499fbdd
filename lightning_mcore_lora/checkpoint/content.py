"""Save and load what a run is made of: weights, optimizers, random streams, and plain data.

A checkpoint is a directory of Megatron-Core's ``dist_checkpointing`` with whole logical tensors in it, so that it can
be read at any tensor-, expert-, expert-tensor- and data-parallel size:

=================  ==================================================================================================
``*.distcp``       each rank's parts of ``model.<name>``, ``optimizer.<i>.<state>.<name>`` and ``process``
``.metadata``      which part lies where
``metadata.json``  Megatron-Core's: which format that is
``common.pt``      what all ranks share: ``rest``, and of each optimizer its settings and single numbers
``manifest.json``  see :mod:`lightning_mcore_lora.checkpoint.manifest`
=================  ==================================================================================================
"""

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.optim import Optimizer

from lightning_mcore_lora.checkpoint import manifest as manifests
from lightning_mcore_lora.checkpoint import place, process_state, sharded_io
from lightning_mcore_lora.checkpoint.errors import CheckpointError, together
from lightning_mcore_lora.checkpoint.manifest import Manifest
from lightning_mcore_lora.checkpoint.optimizer_state import (
    OptimizerState,
    check,
    in_common,
    names_of,
    of_all_ranks,
    put_together,
    take_apart,
)
from lightning_mcore_lora.checkpoint.process_state import ProcessState
from lightning_mcore_lora.checkpoint.shards import Shards, by_key, of_any_expert, row
from lightning_mcore_lora.checkpoint.tensors import Tensors, check_can_load
from lightning_mcore_lora.parallel import ParallelContext

_COMMON = "common.pt"
_MODEL = "model"


def _optimizer(index: int, state: str) -> str:
    return f"optimizer.{index}.{state}"


@dataclass
class Loaded:
    """What a checkpoint held.

    Args:
        manifest: What it says about itself.
        rest: What was saved beside the tensors.
        weights: Name to this rank's value of what is trained, in float32, and of buffers.
        optimizer_states: A ``state_dict`` of each optimizer; empty if none was saved, or asked for.
        process: This process's random streams; ``None`` if not asked for.
        origin: Whose they were.
    """

    manifest: Manifest
    rest: dict[str, Any]
    weights: dict[str, Tensor]
    optimizer_states: list[dict[str, Any]]
    process: ProcessState | None
    origin: process_state.Origin


class Save:
    """A checkpoint directory that is being written beside its place. Its methods are collectives over all processes.

    Args:
        path: The directory to make; an existing one is replaced when this one is complete.
        tensors: What there is to save: what is trained in float32, buffers, and with ``everything`` the frozen base.
        rest: Plain data, the same on every rank; saved by rank zero.
        optimizers: Optimizers of what is trained; none to save weights only.
        parallel: The layout.
        process: What this rank keeps for itself; gets what the optimizers keep.
        step: Optimizer step, for the manifest.
        everything: Whether to save the frozen base too.
        left_out: Names that are not saved.
        in_background: Whether to return while it is written; :meth:`advance` completes it.

    Raises:
        CheckpointError: On every rank, if the directory cannot be written; one that was there is left as it is.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Tensors,
        rest: dict[str, Any],
        optimizers: Sequence[Optimizer],
        parallel: ParallelContext,
        process: ProcessState,
        *,
        step: int | None = None,
        everything: bool = False,
        left_out: Collection[str] = (),
        in_background: bool = False,
    ) -> None:
        self._path = Path(path).absolute()
        self._what = f"cannot write {self._path}"
        self._parallel = parallel
        self._to_remove: list[Path] = []
        self.is_complete = False
        beside: list[Path | None] = [None]
        with together(self._what):
            if parallel.global_rank == 0:
                beside = [place.begin(self._path)]
        torch.distributed.broadcast_object_list(beside)
        assert beside[0] is not None
        self._beside = beside[0]
        with self._or_clean_up():
            parts, common = _gather(tensors, rest, optimizers, parallel, process, everything, left_out, self._what)
            with together(self._what):
                if parallel.global_rank == 0:
                    (self._beside / _COMMON).write_bytes(_plain(common))
                self._manifest = manifests.describe(tensors.module, parallel, step, everything, bool(optimizers))
            self._writing = sharded_io.Writing(by_key(parts), self._beside, self._what, in_background)
        if not in_background:
            self.advance()

    def advance(self, wait: bool = True) -> None:
        """Complete the checkpoint if every rank has written its parts, or else wait for that if told to.

        Raises:
            CheckpointError: On every rank, if it could not be written.
        """
        with self._or_clean_up():
            if self.is_complete or not self._writing.is_done(wait):
                return
            self.is_complete = True
            files = self._sums()
            with together(self._what):
                if self._parallel.global_rank == 0:
                    missing = [name for name in files if not (self._beside / name).is_file()]
                    if missing:
                        raise CheckpointError(f"rank 0 does not see {missing[:3]}: all nodes must share the directory")
                    replace(self._manifest, files=files).write(self._beside)
                    place.sync(self._beside / manifests.NAME)
                    place.commit(self._beside, self._path)
            if self._parallel.global_rank == 0:
                for path in self._to_remove:
                    try:
                        place.remove(path)
                    except OSError as error:
                        rank_zero_warn(f"{path} is not deleted: {error}")

    def remove_then(self, path: Path) -> None:
        """Delete another checkpoint when this one is complete, and not before."""
        self._to_remove.append(path.absolute())

    def _sums(self) -> dict[str, dict[str, int | str]]:
        """Sums of all files, each taken by the rank that wrote it."""
        mine: dict[str, dict[str, int | str]] = {}
        rank = self._parallel.global_rank
        with together(self._what):
            if rank == 0:
                sharded_io.write_config(self._beside)
            for file in sorted(self._beside.iterdir()):
                if file.name.startswith(f"__{rank}_") or (rank == 0 and not file.name.startswith("__")):
                    place.sync(file)
                    mine[file.name] = place.checksum(file)
        everyone: list[Any] = [None] * self._parallel.sizes.world_size
        torch.distributed.all_gather_object(everyone, mine)
        return {name: entry for sums in everyone for name, entry in sums.items()}

    @contextmanager
    def _or_clean_up(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            self.is_complete = True  # there is nothing to complete any more
            if self._parallel.global_rank == 0:
                place.discard(self._beside)  # a full disk has room again
            raise


def _gather(
    tensors: Tensors,
    rest: dict[str, Any],
    optimizers: Sequence[Optimizer],
    parallel: ParallelContext,
    process: ProcessState,
    everything: bool,
    left_out: Collection[str],
    what: str,
) -> tuple[list[ShardedTensor], dict[str, Any]]:
    """This rank's parts, and what all share."""
    shards = Shards(tensors.all, parallel)
    held = {**tensors.trained, **tensors.buffers, **(tensors.frozen if everything else {})}
    parts = list(shards.parts(_MODEL, {name: value for name, value in held.items() if name not in left_out}))
    states = [take_apart(optimizer, tensors.trained, shards) for optimizer in optimizers]
    for i, state in enumerate(states):
        for key, values in state.like.items():
            parts += shards.parts(_optimizer(i, key), values)
    process.states = [state.own for state in states]
    own = process_state.pack(process, what)
    parts.append(row(process_state.KEY, own, parallel.global_rank, parallel.sizes.world_size))
    shared: list[Any] = [None] * parallel.sizes.world_size
    torch.distributed.all_gather_object(shared, [in_common(*pair, shards) for pair in zip(optimizers, states)])
    return parts, {"rest": rest, "optimizers": [of_all_ranks(list(ranks)) for ranks in zip(*shared, strict=True)]}


def _plain(common: dict[str, Any]) -> bytes:
    """The bytes of plain data; what cannot be read without running code is found out now, and not on resuming.

    Raises:
        CheckpointError: Naming it.
    """
    try:
        return _readable(common)
    except Exception as whole:
        for key, value in common["rest"].items():
            try:
                _readable(value)
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise CheckpointError(
                    f"{key!r} of the checkpoint is not plain data ({reason}): keep to numbers, strings, lists, "
                    "dictionaries and tensors, in hyperparameters too (save_hyperparameters(ignore=...))"
                ) from error
        raise CheckpointError(f"the optimizer's settings are not plain data: {whole}") from whole


def _readable(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    content = stream.getvalue()
    torch.load(io.BytesIO(content), weights_only=True)
    return content


def open_checkpoint(path: Path, parallel: ParallelContext) -> Manifest:
    """Check that a checkpoint is complete and undamaged, each rank its share of the files. A collective.

    Raises:
        CheckpointError: On every rank, if it is not.
    """
    what = f"cannot load {path}"
    with together(what):
        if parallel.global_rank == 0:
            place.find(path)
    with together(what):
        manifest = Manifest.read(path.resolve())
        files = list(manifest.files.items())
        if unsummed := {_COMMON, sharded_io.METADATA} - manifest.files.keys():
            raise CheckpointError(f"damaged: {manifests.NAME} does not name {', '.join(sorted(unsummed))}")
        place.verify(path.resolve(), files[parallel.global_rank :: parallel.sizes.world_size])
    if parallel.global_rank == 0:
        for rest in place.unfinished(path):
            rank_zero_warn(f"{rest} is what a save wrote before it was stopped. It is ignored; delete it at will")
    return manifest


def load(
    path: str | Path,
    tensors: Tensors,
    optimizers: Sequence[Optimizer],
    parallel: ParallelContext,
    strict: bool = True,
    manifest: Manifest | None = None,
    with_streams: bool = False,
) -> Loaded:
    """Read a checkpoint directory for a module that has its adapters already. A collective over all processes.

    The layout may be another. Frozen weights are set if they are in the checkpoint, and may be absent; what is trained
    is returned.

    Args:
        path: The directory.
        tensors: What there is; what is trained is not changed.
        optimizers: Optimizers of what is trained; empty to read weights only.
        parallel: The layout.
        strict: Whether every trained name must be in the checkpoint, each of its names in the module, and the base and
            the adapters' settings the same; otherwise what is in both is read.
        manifest: What :func:`open_checkpoint` returned, if that was called.
        with_streams: Whether to read the random streams too, for a run that goes on.

    Returns:
        What it held.

    Raises:
        CheckpointError: On every rank, if it is incomplete, damaged or tampered with, or of another model.
    """
    path = Path(path).absolute()
    what = f"cannot load {path}"
    check_can_load(tensors.module)
    manifest = manifest or open_checkpoint(path, parallel)
    directory = path.resolve()
    with together(what):
        metadata = sharded_io.read_metadata(directory, manifest.files)
        there = _There(metadata)
        common = torch.load(directory / _COMMON, map_location="cpu", weights_only=True)
        here = manifests.base_identity(tensors.module)["path"]
        shards = Shards(tensors.all, parallel, (here, manifest.base["path"]))
        if strict:
            _check_module(manifest, tensors, shards, there)
        saved = common["optimizers"] if optimizers else []
        origin = process_state.origin(manifest.sizes, parallel)
        if saved and len(saved) != len(optimizers):
            raise CheckpointError(f"it holds {len(saved)} optimizers, this run has {len(optimizers)}")
        for optimizer, entry in zip(optimizers, saved, strict=False):
            check(optimizer, names_of(optimizer, tensors.trained), entry, shards, manifest.sizes == parallel.sizes)
    if manifest.weights == "trained" and manifests.other_weights(manifest, tensors.module):
        name = manifest.base["name"] or "the base model"
        rank_zero_warn(f"{path}: {name} had other weights when this was saved; adapters fit the base they were made on")

    # Zeros: a vocabulary may have been padded less.
    weights = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in tensors.trained.items() if there.has(shards, n)}
    weights |= {n: torch.empty_like(b) for n, b in tensors.buffers.items() if there.has(shards, n)}
    frozen = {n: p for n, p in tensors.frozen.items() if there.has(shards, n)}
    parts = list(shards.parts(_MODEL, {**weights, **frozen}))
    states = []
    for i, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=False)):
        names = names_of(optimizer, tensors.trained)
        state = OptimizerState(entry["groups"], names, numbers=entry["numbers"])
        for key in entry["like"]:
            prefix = _optimizer(i, key)
            state.like[key] = {
                name: torch.zeros_like(tensors.trained[name], dtype=there.dtype(shards, name, prefix))
                for group in names
                for name in group
                if there.has(shards, name, prefix)
            }
            parts += shards.parts(prefix, state.like[key])
        states.append(state)
    streams = None
    if with_streams:
        streams = torch.empty(there.shape(process_state.KEY)[1:], dtype=torch.uint8)[None]
        parts.append(row(process_state.KEY, streams, origin.rank, manifest.sizes.world_size))
    with torch.no_grad():
        sharded_io.read(by_key(parts), directory, metadata)
    process = None
    with together(what):
        if streams is not None:
            process = process_state.unpack(streams)
            for state, own in zip(states, process.states, strict=False):
                state.own = own
    return Loaded(
        manifest,
        common["rest"],
        weights,
        [put_together(state, shards) for state in states],
        process,
        origin,
    )


class _There:
    """What tensors a checkpoint holds, by key."""

    def __init__(self, metadata: Metadata) -> None:
        self._items: Mapping[str, Any] = metadata.state_dict_metadata

    def has(self, shards: Shards, name: str, prefix: str = _MODEL) -> bool:
        return shards.is_empty(name) or all(key in self._items for key in shards.keys(prefix, name))

    def dtype(self, shards: Shards, name: str, prefix: str) -> torch.dtype:
        return self._items[shards.keys(prefix, name)[0]].properties.dtype

    def shape(self, key: str) -> torch.Size:
        return self._items[key].size

    def weights(self) -> set[str]:
        """Keys of the model's weights."""
        return {key for key in self._items if key.startswith(f"{_MODEL}.")}


def _check_module(manifest: Manifest, tensors: Tensors, shards: Shards, there: _There) -> None:
    """Raises what is wrong with a module as the one to load into."""
    missing = sorted(name for name in tensors.trained if not there.has(shards, name))
    known = {of_any_expert(key) for name in tensors.all for key in shards.keys(_MODEL, name)}
    saved = {of_any_expert(key) for key in there.weights()}
    unexpected = sorted(key.removeprefix(f"{_MODEL}.") for key in saved - known)
    if manifest.base["path"] and not manifests.base_identity(tensors.module)["path"]:
        # Into the base model alone goes what is the base model's.
        unexpected = [name for name in unexpected if name.startswith(f"{manifest.base['path']}.")]
    wrong = manifests.differences(manifest, tensors.module)
    if missing or unexpected:
        wrong.append(
            f"its parameters are not those of this run. Missing in the checkpoint: {missing[:5]}; unexpected there: "
            f"{unexpected[:5]}"
        )
    if wrong:
        raise CheckpointError(
            f"{'; '.join(wrong)}. Use the base and the LoRA settings that it was saved with (strict=False, in a "
            "LightningModule strict_loading=False, reads what fits)"
        )
