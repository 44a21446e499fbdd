"""A directory is in its place whole or not at all."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore_lora.checkpoint import place
from lightning_mcore_lora.checkpoint.errors import CheckpointError


def write(path: Path, text: str) -> None:
    """Save a text."""
    beside = place.begin(path)
    (beside / "file").write_text(text)
    (beside / place.MANIFEST).write_text("{}")
    place.commit(beside, path)


def read(path: Path) -> str:
    """Load it."""
    place.find(path)
    return (path / "file").read_text()


class Stop(BaseException):
    """The process is gone."""


@pytest.fixture(params=["exchange", "two renames"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a file system that can exchange two directories."""
    if request.param == "two renames":
        monkeypatch.setattr(place, "_exchange", lambda *_: False)


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Be gone just before the n-th change that is made to the file system, if there are so many."""
    left = [call]

    def counted(before: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Stop
            return before(*args, **kwargs)

        return change

    for owner, name in ((os, "mkdir"), (os, "rename"), (os, "rmdir"), (os, "unlink"), (place, "_exchange")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("call", range(1, 12))
def test_stopped_before_any_change_one_is_whole(tmp_path: Path, call: int) -> None:
    path = tmp_path / "last.ckpt"
    write(path, "old")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, call)
        with contextlib.suppress(Stop):
            write(path, "new")
    assert read(path) in ("old", "new")
    write(path, "newer")
    assert read(path) == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"], "nothing is left over"


def test_what_is_half_written_is_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    beside = place.begin(path)
    assert place.unfinished(path) == [beside]
    with pytest.raises(CheckpointError, match="is not complete: the save was stopped"):
        place.find(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        place.find(tmp_path / "other.ckpt")


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("call", range(1, 8))
def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path: Path, call: int) -> None:
    write(tmp_path / "step=1.ckpt", "first")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Stop):
        stop_at(patch, call)
        write(tmp_path / "last.ckpt", "last")
    assert read(tmp_path / "last.ckpt") in ("first", "last")
    write(tmp_path / "last.ckpt", "last")
    assert (read(tmp_path / "last.ckpt"), read(tmp_path / "step=1.ckpt")) == ("last", "first")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt"]


@pytest.mark.usefixtures("exchange")
def test_a_file_in_the_way_goes(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_text("of another strategy")
    write(tmp_path / "last.ckpt", "last")
    assert read(tmp_path / "last.ckpt") == "last"
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_removed(tmp_path: Path) -> None:
    path = tmp_path / "step=1.ckpt"
    write(path, "first")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    place.remove(tmp_path / "last.ckpt")
    assert read(path) == "first"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stop):
            place.remove(path)
    assert not path.exists(), "half deleted it no longer bears its name"
    place.remove(path)
    write(path, "again")
    assert [p.name for p in tmp_path.iterdir()] == ["step=1.ckpt"]


def test_nothing_but_a_checkpoint_is_removed(tmp_path: Path) -> None:
    for name in ("checkpoints", "thesis"):
        (tmp_path / name).mkdir()
    with pytest.warns(UserWarning, match="is not deleted: it is no checkpoint"):
        place.remove(tmp_path / "checkpoints" / ".." / "thesis")
    assert (tmp_path / "thesis").is_dir()


def test_a_failed_replacement_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    write(path, "old")
    beside = place.begin(path)
    monkeypatch.setattr(place, "_exchange", lambda *_: False)
    place.discard(beside)
    with pytest.raises(OSError, match="No such file"):
        place.commit(beside, path)
    assert read(path) == "old"
