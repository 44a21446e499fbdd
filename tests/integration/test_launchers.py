"""Every way of starting the processes gives the same run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_mcore_lora import MCoreTP
from lightning_mcore_lora.strategy.environment import cuda_defaults
from tests.integration.test_resume import ROOT, assert_equal, final, finish, free_port, start

SCRIPT = str(ROOT / "tests/scripts/tiny_fit.py")


def agents(options: list[Any], environments: list[dict[str, str]], *launcher: str) -> list[subprocess.Popen]:
    """One process an environment, each of which runs the script."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    inherited |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *launcher, SCRIPT, *map(str, options)],
            env=inherited | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]


@pytest.fixture(scope="module")
def straight(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    finish(start("--model", tiny_llama, "--out", out, "--steps", 2))
    return out


def two_torchruns(port: int) -> tuple[list[dict[str, str]], list[str]]:
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    return [{"PET_NODE_RANK": "0"}, {"PET_NODE_RANK": "1"}], [*launcher, f"--master-port={port}"]


def two_nodes(port: int) -> tuple[list[dict[str, str]], list[str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [common | {"NODE_RANK": "0"}, common | {"NODE_RANK": "1"}], []


def slurm(port: int) -> tuple[list[dict[str, str]], list[str]]:
    common = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "tune",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(port),
    }
    return [common | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)} for i in (0, 1)], []


@pytest.mark.parametrize("way", [two_torchruns, slurm, pytest.param(two_nodes, marks=pytest.mark.full)])
def test_two_agents(tiny_llama: Path, tmp_path: Path, straight: Path, way: Any) -> None:
    environments, launcher = way(free_port())
    options = ["--model", tiny_llama, "--out", tmp_path, "--steps", 2, "--devices", 1, "--nodes", 2]
    for process in agents(options, environments, *launcher):
        finish(process)
    for rank in (0, 1):
        assert_equal(final(straight, rank), final(tmp_path, rank))


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.full)])
def test_spawn(tiny_llama: Path, tmp_path: Path, more: bool) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.scripts.spawned",
            "--model",
            str(tiny_llama),
            "--out",
            str(tmp_path),
            *["--more"] * more,
        ],
        cwd=ROOT,
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
    if more:
        assert result["longer"] != result["after fit"]
        assert result["fabric"] > 0


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_process_ends_the_scripts(tiny_llama: Path, tmp_path: Path, rank: int) -> None:
    """The launcher's own processes: no orphan, whichever is killed."""
    process = start("--model", tiny_llama, "--out", tmp_path, "--kill-at", 1, "--kill-rank", rank)
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


@pytest.mark.parametrize(
    ("environ", "tp", "added"),
    [
        ({}, 2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({}, 1, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
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
