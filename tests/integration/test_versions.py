"""Each version of Megatron-Core reads what the others have written."""

import json
from pathlib import Path

import pytest

from tests import golden
from tests.workers import WorkerPool

CHECKPOINTS = sorted(golden.FOLDER.glob("mcore-*.ckpt"))


def test_both_versions_are_there() -> None:
    for checkpoint in CHECKPOINTS:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert checkpoint.stem == f"mcore-{manifest['packages']['megatron-core']}"
    assert [checkpoint.stem.rpartition(".")[0] for checkpoint in CHECKPOINTS] == ["mcore-0.16", "mcore-0.19"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda path: path.stem)
def test_reads(workers: WorkerPool, checkpoint: Path, size: int) -> None:
    workers(size, golden.read, str(checkpoint), size)
