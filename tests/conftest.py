"""Fixtures: one pool of workers, the tiny Llama on disk, the oracle's run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.smollm2 import smollm2_directory
from tests import families, tiny
from tests.oracle import Oracle, Run
from tests.runs import CLIP
from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Worker processes shared by all tests."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny Llama."""
    return tiny.write(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directory of a tiny model of each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: families.write(name, root / name.replace(" ", "-")) for name in families.MODELS}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct."""
    try:
        return smollm2_directory(Path(__file__).parents[1] / ".cache").resolve()
    except SystemExit as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def oracle_run(tiny_llama: Path) -> Run:
    """The oracle's five steps."""
    return Oracle(tiny_llama).train(CLIP)
