"""Start a benchmark's processes, and save what it found."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def on_processes(world_size: int, worker: Callable, *args: Any) -> Any:
    """Run ``worker(rank, folder, *args)`` on processes of their own.

    Returns:
        What rank zero gave to :func:`hand_over`.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(worker, (folder, *args), nprocs=world_size, join=False)
        while not context.join():
            pass
        return json.loads(Path(folder, "result.json").read_text())


def hand_over(rank: int, folder: str, results: Any) -> None:
    """Give the results to the process that waits, and end."""
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save(path: Path, settings: dict[str, Any], cases: Any) -> None:
    """Write settings and cases as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**settings, "torch": torch.__version__, "cases": cases}, indent=2) + "\n")
    print(f"saved to {path}")
