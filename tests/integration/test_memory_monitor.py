"""Memory in the logs of real runs on two processes."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_mcore_lora import FabricMemoryMonitor, MCoreTP, MemoryMonitor
from lightning_mcore_lora.memory import readings
from tests import runs, tiny
from tests.runs import TinyModule
from tests.workers import WorkerPool

KEYS = {"memory/peak_rss_gib", "memory/rss_gib", "memory/worst_rank"}


def _stand_in(patch: pytest.MonkeyPatch) -> list[int]:
    """Rank 1 takes more; the sizes of all maximum reductions are noted."""
    sizes: list[int] = []
    rank, reduce = torch.distributed.get_rank(), torch.distributed.all_reduce

    def close(self: Any) -> dict[str, float]:
        return {"memory/peak_rss_gib": 2.0 + rank, "memory/rss_gib": 2.0 - rank}

    def all_reduce(tensor: Any, op: Any = torch.distributed.ReduceOp.SUM, **kwargs: Any) -> Any:
        if op == torch.distributed.ReduceOp.MAX and tensor.dtype == torch.float64:
            sizes.append(tensor.numel())
        return reduce(tensor, op=op, **kwargs)

    patch.setattr(readings.MemoryWindow, "close", close)
    patch.setattr(torch.distributed, "all_reduce", all_reduce)
    return sizes


def _fit(directory: str, out: str | None, every: int) -> tuple[list[int], dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        sizes = _stand_in(patch)
        trainer = runs.trainer(
            MCoreTP(tensor_parallel_size=2),
            "local",
            callbacks=(MemoryMonitor(prog_bar=True),),
            logger=CSVLogger(out, name="log", version=0) if out else False,
            log_every_n_steps=every,
            num_sanity_val_steps=0,
        )
        trainer.fit(TinyModule(directory))
    return sizes, {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def test_the_worst_rank_is_named(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    for sizes, shown in workers(2, _fit, str(tiny_llama), str(tmp_path), 2):
        assert sizes == [4] * (tiny.STEPS // 2), "one reduction at each logged step: two values, two ranks"
        assert shown["memory/peak_rss_gib"] == 3.0
        assert "memory/rss_gib" not in shown
    with (tmp_path / "log/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["memory/peak_rss_gib"]]
    assert len(rows) == tiny.STEPS // 2
    found = {name: float(value) for name, value in rows[-1].items() if name.startswith("memory/")}
    assert found == {"memory/peak_rss_gib": 3.0, "memory/rss_gib": 2.0, "memory/worst_rank": 1.0}


def test_without_a_logger(workers: WorkerPool, tiny_llama: Path) -> None:
    for _, shown in workers(2, _fit, str(tiny_llama), None, 1):
        assert shown["memory/peak_rss_gib"] == 3.0


def _fabric(out: str) -> list[dict[str, float]]:
    from lightning.fabric.loggers import CSVLogger as FabricCSVLogger

    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2), loggers=FabricCSVLogger(out, name="log", version=0))
    monitor = FabricMemoryMonitor(fabric, every=2)
    with pytest.MonkeyPatch.context() as patch:
        sizes = _stand_in(patch)
        values = [monitor.step(step) for step in range(1, 5)]
    assert sizes == [4, 4]
    fabric.logger.save()
    return values


def test_fabric(workers: WorkerPool, tmp_path: Path) -> None:
    for values in workers(2, _fabric, str(tmp_path)):
        assert [set(value) for value in values] == [set(), KEYS, set(), KEYS]
        assert values[1] == {"memory/peak_rss_gib": 3.0, "memory/rss_gib": 2.0, "memory/worst_rank": 1.0}
    with (tmp_path / "log/version_0/metrics.csv").open() as file:
        assert [(row["step"], row["memory/worst_rank"]) for row in csv.DictReader(file)] == [("2", "1.0"), ("4", "1.0")]


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="every=0 must be a positive integer"):
        FabricMemoryMonitor(None, every=0)  # type: ignore[arg-type]
