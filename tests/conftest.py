"""Fixtures: one pool of workers, the tiny Llama on disk, the oracle's run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
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
def oracle_run(tiny_llama: Path) -> Run:
    """The oracle's five steps."""
    return Oracle(tiny_llama).train(CLIP)
