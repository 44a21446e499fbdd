"""A directory that is there whole or not at all: written beside its place, checked by sums, moved by one rename."""

import contextlib
import ctypes
import errno
import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_mcore_lora.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_BLOCK = 1 << 20


def _workshop(path: Path) -> Path:
    """Where checkpoints of a folder are written and deleted: out of sight of whoever looks for them by name."""
    return path.parent / ".saving"


def partials(path: Path) -> list[Path]:
    """Directories in which a checkpoint was written and not completed."""
    return sorted(_workshop(path).glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"))


def _replaced(path: Path) -> Path:
    return _workshop(path) / f"{path.name}.replaced"


def begin(path: Path) -> Path:
    """Make an empty directory to write to; what earlier saves and removals left half done is deleted.

    No other save has had its name: what a killed run is still writing lands elsewhere.
    """
    _workshop(path).mkdir(parents=True, exist_ok=True)
    for rest in (*_workshop(path).glob("*.removed"), *partials(path)):
        _delete(rest)
    beside = _workshop(path) / f"{path.name}.{secrets.token_hex(4)}.partial"
    beside.mkdir()
    return beside


def commit(beside: Path, path: Path) -> None:
    """Put the complete directory in its place, in one step; what is there already goes."""
    old = _replaced(path)
    sync(beside)
    if not _is_taken(path):
        beside.rename(path)
    elif _exchange(beside, path):
        old = beside
    else:  # two renames, on file systems that have no exchange: `find` ends what a kill in between leaves
        _delete(old)
        path.rename(old)
        try:
            beside.rename(path)
        except OSError:
            old.rename(path)
            raise
    sync(path.parent)
    discard(old)


def discard(beside: Path) -> None:
    """Delete what was written and is not wanted."""
    _delete(beside)
    with contextlib.suppress(OSError):  # there is more in it
        beside.parent.rmdir()


def remove(path: Path) -> None:
    """Delete a checkpoint, and nothing else; half deleted it no longer bears its name."""
    if path.is_symlink():
        path.unlink()
    elif (path / MANIFEST).is_file():
        gone = _workshop(path) / f"{path.name}.removed"
        gone.parent.mkdir(exist_ok=True)
        _delete(gone)
        path.rename(gone)
        _delete(_replaced(path))
        discard(gone)
    elif path.exists():
        rank_zero_warn(f"{path} is not deleted: it is no checkpoint, it has no {MANIFEST}")


def _is_taken(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _delete(path: Path) -> None:
    """Delete whatever it is; of a link not what it leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def find(path: Path) -> None:
    """Check that a checkpoint is there, after ending a replacement that a kill has stopped half-way.

    Raises:
        CheckpointError: If it is not.
    """
    if path.exists():
        return
    if _is_taken(_replaced(path)):
        _replaced(path).rename(path)
    elif partials(path):
        raise CheckpointError(
            f"{path} is not complete: the save was stopped. What it wrote is in {partials(path)[0].name} and cannot be "
            "used; resume from an earlier checkpoint"
        )
    else:
        raise CheckpointError(f"{path} does not exist")


def unfinished(path: Path) -> list[Path]:
    """What stopped saves have left beside a checkpoint."""
    return sorted(_workshop(path).glob("*.partial"))


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(file: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
        return {"bytes": stream.tell(), "sha256": digest.hexdigest()}


def verify(directory: Path, files: Iterable[tuple[str, dict[str, int | str]]]) -> None:
    """Check files of a directory against their sums.

    Raises:
        CheckpointError: Naming each that is missing, leads elsewhere, is cut short or has changed.
    """
    wrong = [f"{name} {fault}" for name, expected in files if (fault := _fault(directory, name, expected))]
    if wrong:
        raise CheckpointError(f"damaged: {', '.join(wrong)}. Use another checkpoint, or a copy of this one")


def _fault(directory: Path, name: str, expected: dict[str, int | str]) -> str | None:
    file = directory / name
    if Path(name).name != name or file.is_symlink():
        return "leads outside"
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != expected["bytes"]:
        return f"has {file.stat().st_size} bytes, not {expected['bytes']}"
    return None if checksum(file) == expected else "has changed"


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))
