"""Memory in the log."""

import resource
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_mcore_lora.callbacks.logging import is_logged, log

_GIB = 2**30


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process in GiB: the allocator's on CUDA, the resident set's on the CPU.

    Returns:
        ``memory/peak_allocated_gib`` since the last reset on CUDA, or ``memory/peak_rss_gib`` since the process began.
    """
    if device.type == "cuda":
        return {"memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB}
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    return {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB}


class MemoryMonitor(pl.Callback):
    """Logs peak memory, the largest over all ranks, each time the Trainer logs.

    On CUDA ``memory/peak_allocated_gib`` is the peak since the previous log; on the CPU ``memory/peak_rss_gib`` is the
    peak resident set since the process began, which cannot be reset.
    """

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        if not is_logged(trainer):
            return
        device = trainer.strategy.root_device
        values = peak_memory(device)
        worst = torch.tensor(list(values.values()), dtype=torch.float32, device=device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
        log(pl_module, dict(zip(values, worst.tolist(), strict=True)))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
