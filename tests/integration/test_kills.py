"""Whatever is killed, whenever: a whole checkpoint is there, and what is half written is nobody's checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from lightning_mcore_lora.checkpoint import place
from tests import kills
from tests.launch import free_port
from tests.workers import WorkerError, WorkerPool

QUICK, IN_BACKGROUND = 3, 20
SEEDS = [pytest.param(seed, marks=[] if seed < QUICK else pytest.mark.full) for seed in range(IN_BACKGROUND + 6)]


def check_whole(workers: WorkerPool, path: Path, least: int) -> dict[str, Any]:
    """A checkpoint is of one generation throughout, not older than what was known to be saved."""
    found = workers(1, kills.read, str(path))[0]
    assert found["values"] == {found["generation"]}
    assert found["generation"] >= least
    for rest in place.unfinished(path):
        assert any(rest.name in text for text in found["said"]), "what was stopped is said"
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_inside_a_save(workers: WorkerPool, tmp_path: Path, seed: int) -> None:
    replace = seed % 2 == 0
    settings = {"async_save": seed >= IN_BACKGROUND}
    saved, killed, outputs = kills.kill_while_saving(
        tmp_path, seed, free_port(), replace, exchange=seed % 4 != 0, settings=settings
    )
    for rank in {0, 1} - set(killed):
        assert f"rank {killed[0]}" in outputs[rank], outputs[rank][-2000:]
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    if replace:
        assert len(checkpoints) <= 1
        check_whole(workers, tmp_path / "last.ckpt", saved)
        return
    newest = max(int(path.stem.split("=")[1]) for path in checkpoints)
    assert len(checkpoints) == newest >= saved
    check_whole(workers, tmp_path / f"step={newest}.ckpt", newest)
    check_whole(workers, tmp_path / f"step={saved}.ckpt", saved)
    for unfinished in place.partials(tmp_path / f"step={newest + 1}.ckpt"):
        if (unfinished / "manifest.json").exists():
            continue  # killed between the manifest and the rename
        with pytest.raises(WorkerError, match=r"is not complete: the save was stopped"):
            workers(1, kills.read, str(tmp_path / f"step={newest + 1}.ckpt"))
        with pytest.raises(WorkerError, match=r"not a complete checkpoint"):
            workers(1, kills.read, str(unfinished))
