"""Every way of starting the processes gives the same run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mcore_lora import MCoreTP
from lightning_mcore_lora.strategy.environment import cuda_defaults
from lightning_mcore_lora.strategy.launchers import SpawnLauncher
from tests import launch
from tests.integration.test_resume import assert_equal, final


@pytest.mark.full
def test_nodes_by_hand(tiny_llama: Path, tmp_path: Path) -> None:
    """torchrun and SLURM are in ``test_resume.py``."""
    for name, way in (("script", launch.script), ("nodes", launch.two_nodes)):
        (tmp_path / name).mkdir()
        launch.finish(*way("--model", tiny_llama, "--out", tmp_path / name, "--steps", 2))
    for rank in (0, 1):
        assert_equal(final(tmp_path / "script", rank), final(tmp_path / "nodes", rank))


def test_what_may_follow_a_spawned_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SpawnLauncher(MCoreTP(start_method="spawn"))
    monkeypatch.setattr(_MultiProcessingLauncher, "launch", lambda *args, **kwargs: "launched")
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))

    def entry(model: Any, ckpt_path: str | None = None) -> None: ...

    assert launcher.launch(entry, None, None, trainer=trainer) == "launched"
    with pytest.raises(RuntimeError, match=r"the processes that trained ended with fit\(\), .* ckpt_path='best'"):
        launcher.launch(entry, None, None, trainer=trainer)
    assert launcher.launch(entry, None, "last", trainer=trainer) == "launched"


@pytest.mark.full
def test_spawn(tiny_llama: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.scripts.spawned",
            "--model",
            str(tiny_llama),
            "--out",
            str(tmp_path),
        ],
        cwd=launch.ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for entry in ("validate", "fit"):
        assert "the processes that trained ended with fit(), and their weights with them" in result[entry]
        assert "ckpt_path='best', 'last' or a path" in result[entry]
    assert result["last"] == result["after fit"]
    assert result["longer"] != result["after fit"]
    assert result["fabric"] > 0


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_scripts(tiny_llama: Path, tmp_path: Path, rank: int) -> None:
    """The launcher's own processes: no orphan, whichever is killed."""
    (process,) = launch.script("--model", tiny_llama, "--out", tmp_path, "--kill-at", 1, "--kill-rank", rank)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    if rank:  # whichever is first: this package, or Lightning's launcher
        assert re.search(r"rank 1 stopped without a word|\[rank: 1\] Child process", output), output[-3000:]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def test_unknown_start_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start_method='fork' must be one of \('popen', 'spawn'\)"):
        MCoreTP(start_method="fork")


# -- what CUDA must find when it starts ------------------------------------------------------------------------


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("environ", "tp", "added"),
    [
        ({}, 2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"}),
        ({"NCCL_GRAPH_REGISTER": "0"}, 1, EXPANDABLE),
        ({"NCCL_GRAPH_REGISTER": "1"}, 1, {}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, 2, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, 1, {}),
    ],
)
def test_cuda_defaults_respect_what_is_set(environ: dict[str, str], tp: int, added: dict[str, str]) -> None:
    assert cuda_defaults(environ, tp) == added


@pytest.mark.parametrize("started", [False, True])
def test_cuda_defaults_are_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    MCoreTP(tensor_parallel_size=2).engine.set_cuda_defaults()
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in os.environ) is not started
