"""Ways of starting the training script with two processes; each returns what it started."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "tests/scripts/tiny_fit.py")
_TWO_NODES = ("--devices", 1, "--nodes", 2)


def script(*options: Any) -> list[subprocess.Popen]:
    """The script starts its second process itself."""
    return [_start({}, "-m", "tests.scripts.tiny_fit", *options)]


def two_torchruns(*options: Any) -> list[subprocess.Popen]:
    """Two node agents on this machine."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    port = f"--master-port={free_port()}"
    return [_start({}, *launcher, f"--node-rank={i}", port, SCRIPT, *options, *_TWO_NODES) for i in (0, 1)]


def two_nodes(*options: Any) -> list[subprocess.Popen]:
    """The script once a node, with the variables that Lightning documents."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [_start(common | {"NODE_RANK": str(i)}, SCRIPT, *options, *_TWO_NODES) for i in (0, 1)]


def slurm(*options: Any) -> list[subprocess.Popen]:
    """One task a node, with SLURM's variables."""
    common = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "tune",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [common | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)} for i in (0, 1)]
    return [_start(rank, SCRIPT, *options, *_TWO_NODES) for rank in ranks]


def finish(*processes: subprocess.Popen, code: int = 0) -> None:
    """Wait for processes, and check how they ended."""
    for process in processes:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == code, output[-3000:]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(environment: dict[str, str], *command: Any) -> subprocess.Popen:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    # Lightning gives each process its share of the cores, which is more with one process a node: sums would differ.
    inherited |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=inherited | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
