"""Model directories that are there whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".partial"


@contextmanager
def new_directory(out: str | Path) -> Iterator[Path]:
    """A directory to write to, which becomes ``out`` at the end, and is deleted after an error.

    Args:
        out: One that does not exist, or is empty: a mount point, or a link to one, may be.

    Raises:
        FileExistsError: If it has something in it.
    """
    out = Path(out).resolve()
    is_there = out.exists()
    if is_there and (not out.is_dir() or any(file.name != _PARTIAL for file in out.iterdir())):
        raise FileExistsError(f"{out} has something in it: choose another directory, or empty it")
    partial = out / _PARTIAL if is_there else out.with_name(f".{out.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_there:
        for file in partial.iterdir():
            file.rename(out / file.name)
        partial.rmdir()
    else:
        partial.rename(out)
