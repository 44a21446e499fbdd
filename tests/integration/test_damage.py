"""Damaged, hostile and impossible checkpoints: an error on every rank that names the file; no code of theirs is run."""

import dataclasses
import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

from lightning_mcore_lora.checkpoint import manifest as manifests
from lightning_mcore_lora.checkpoint import place
from tests import kills
from tests.workers import WorkerError, WorkerPool

WORLD = 2


def _save(out: str, generation: int, rest: dict[str, Any] | None = None, limit: int | None = None) -> None:
    saver = kills.engine(WORLD, WORLD)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        module = kills.Weights(WORLD)
        module.fill(generation)
        if limit is not None:  # what a full disk or a quota does: the system refuses to write on
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        optimizers = [kills.optimizer_of(module, generation)]
        content = {"generation": generation} | (rest or {})
        saver.save(out, content, saver.tensors(module), optimizers, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        saver.stop()


def _load(path: str) -> None:
    reader = kills.engine(WORLD, WORLD)
    try:
        module = kills.Weights(WORLD)
        reader.load(path, reader.tensors(module), [kills.optimizer_of(module, 0)])
    finally:
        reader.stop()


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    out = tmp_path_factory.mktemp("saved") / "whole.ckpt"
    workers(WORLD, _save, str(out), 3)
    return out


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy.ckpt"))


def everywhere(message: str) -> str:
    """A pattern: every rank says it."""
    return "(?s)" + ".*".join(f"rank {rank}: CheckpointError: [^\n]*{message}" for rank in range(WORLD))


def vouch_for(checkpoint: Path, **changes: Any) -> None:
    """Have the manifest agree with the files, as one would who wants to do harm."""
    manifest = manifests.Manifest(**json.loads((checkpoint / manifests.NAME).read_text(), object_hook=_without_sum))
    files = {path.name: place.checksum(path) for path in checkpoint.iterdir() if path.name != manifests.NAME}
    dataclasses.replace(manifest, files=files, **changes).write(checkpoint)


def _without_sum(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "sha256" or "bytes" in content}


FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "metadata.json", "manifest.json")


def test_those_are_the_files(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(workers: WorkerPool, copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(WorkerError, match=everywhere(f"damaged: {name} (has changed|cannot be read)")):
        workers(WORLD, _load, str(copy))


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found(workers: WorkerPool, copy: Path, name: str) -> None:
    os.truncate(copy / name, (copy / name).stat().st_size - 1 if name != "manifest.json" else 40)
    with pytest.raises(WorkerError, match=everywhere(f"damaged: {name} (has [0-9]+ bytes, not|cannot be read)")):
        workers(WORLD, _load, str(copy))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(workers: WorkerPool, copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(WorkerError, match=everywhere(f"(damaged: {name} is missing|it has no {name})")):
        workers(WORLD, _load, str(copy))


# -- hostile -------------------------------------------------------------------------------------------------


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


def test_metadata_runs_nothing(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    metadata.planner_data = Harm(witness)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch_for(copy)
    pickle.loads((copy / ".metadata").read_bytes())
    assert witness.exists(), "it does what it is feared for"
    witness.unlink()
    with pytest.raises(WorkerError, match=everywhere("names posix.system, which no checkpoint needs")):
        workers(WORLD, _load, str(copy))
    assert not witness.exists()


def test_common_runs_nothing(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    torch.save({"rest": Harm(witness), "optimizers": []}, copy / "common.pt")
    vouch_for(copy)
    with pytest.raises(WorkerError, match=everywhere("cannot load .*it holds more than plain data")):
        workers(WORLD, _load, str(copy))
    assert not witness.exists()


def test_tensors_run_nothing(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    stream = io.BytesIO()
    torch.save(Harm(witness), stream)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.whole")
    content = bytearray((copy / info.relative_path).read_bytes())
    content += stream.getvalue()
    info.offset, info.length = len(content) - len(stream.getvalue()), len(stream.getvalue())
    (copy / info.relative_path).write_bytes(content)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch_for(copy)
    with pytest.raises(WorkerError, match=everywhere("cannot load .*it holds more than plain data")):
        workers(WORLD, _load, str(copy))
    assert not witness.exists()


def test_metadata_leads_nowhere_else(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    shutil.copy(copy / "__0_0.distcp", tmp_path / "outside")
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = info.relative_path.replace("__0_0.distcp", "../outside")
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch_for(copy)
    with pytest.raises(WorkerError, match=everywhere(r"names files that are not the checkpoint's: \['../outside'\]")):
        workers(WORLD, _load, str(copy))


@pytest.mark.parametrize("kind", [OrderedDict, list])
def test_metadata_hides_nothing(workers: WorkerPool, copy: Path, kind: Any) -> None:
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    hidden = kind(metadata.storage_data)
    if kind is OrderedDict:
        hidden.values = hidden.items = OrderedDict  # what looks into it sees nothing
    metadata.storage_data = hidden
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch_for(copy)
    with pytest.raises(WorkerError, match=everywhere("(names collections.OrderedDict|holds a list for a dict)")):
        workers(WORLD, _load, str(copy))


def test_the_manifest_leads_nowhere_else(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    shutil.copy(copy / "__0_0.distcp", tmp_path / "outside")
    content = json.loads((copy / "manifest.json").read_text(), object_hook=_without_sum)
    content["files"]["../outside"] = place.checksum(tmp_path / "outside")
    manifests.Manifest(**content).write(copy)
    with pytest.raises(WorkerError, match=everywhere(r"damaged: \.\./outside leads outside")):
        workers(WORLD, _load, str(copy))


def test_a_link_leads_nowhere_else(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    (copy / "__0_0.distcp").rename(tmp_path / "outside")
    (copy / "__0_0.distcp").symlink_to(tmp_path / "outside")
    with pytest.raises(WorkerError, match=everywhere("damaged: __0_0.distcp leads outside")):
        workers(WORLD, _load, str(copy))


def test_what_has_no_sum_is_not_read(workers: WorkerPool, copy: Path, tmp_path: Path) -> None:
    (copy / ".metadata").rename(tmp_path / "outside")
    (copy / ".metadata").symlink_to(tmp_path / "outside")
    content = json.loads((copy / "manifest.json").read_text(), object_hook=_without_sum)
    del content["files"][".metadata"]
    manifests.Manifest(**content).write(copy)
    with pytest.raises(WorkerError, match=everywhere("damaged: manifest.json does not name .metadata")):
        workers(WORLD, _load, str(copy))


def test_a_link_to_a_checkpoint_is_followed(workers: WorkerPool, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to(saved)
    workers(WORLD, _load, str(tmp_path / "last.ckpt"))


# -- cannot be written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1 << 20, 1 << 10], ids=["shards", "common"])
def test_a_full_disk_fails_on_every_rank(workers: WorkerPool, tmp_path: Path, limit: int) -> None:
    out = tmp_path / "last.ckpt"
    workers(WORLD, _save, str(out), 1)
    with pytest.raises(WorkerError, match=everywhere("cannot write .*File too large")):
        workers(WORLD, _save, str(out), 2, None, limit)
    assert workers(1, kills.read, str(out))[0]["values"] == {1}, "the one before is whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt"], "what was written is gone: there is room"


def _save_without_room_for_metadata(out: str) -> None:
    def finish(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async.FileSystemWriterAsync, "finish", finish)
        _save(out, 2)


def test_metadata_that_rank_zero_cannot_write_fails_on_every_rank(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=everywhere("cannot write .*No space left on device")):
        workers(WORLD, _save_without_room_for_metadata, str(tmp_path / "last.ckpt"))
    assert not list(tmp_path.iterdir())


class Opaque:
    """Cannot be read without running its code."""


def test_what_could_not_be_read_is_not_written(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=everywhere("'hyper_parameters' of the checkpoint is not plain data")):
        workers(WORLD, _save, str(tmp_path / "last.ckpt"), 1, {"hyper_parameters": {"x": Opaque()}})
    assert not list(tmp_path.iterdir())
