"""Memory in the logs of real runs on two processes."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

from lightning_mcore_lora import FabricMemoryMonitor, LoRAConfig, MCoreTP, MemoryMonitor, estimate_memory
from lightning_mcore_lora.memory import monitor, readings
from lightning_mcore_lora.memory.conflicts import CONFLICTS, Conflict
from lightning_mcore_lora.memory.monitor import ConflictError
from lightning_mcore_lora.memory.observed import Observed
from lightning_mcore_lora.parallel import ParallelSizes
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


class Recorder(Logger):
    """A logger of somebody's own."""

    name = version = "recorder"

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if metrics.keys() >= KEYS:
            self.steps.append(step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def _fit(directory: str, out: str | None, every: int) -> tuple[list[int], dict[str, float]]:
    own = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        sizes = _stand_in(patch)
        trainer = runs.trainer(
            MCoreTP(tensor_parallel_size=2),
            "local",
            callbacks=(MemoryMonitor(prog_bar=True),),
            logger=[CSVLogger(out, name="log", version=0), own] if out else False,
            log_every_n_steps=every,
            num_sanity_val_steps=0,
        )
        trainer.fit(TinyModule(directory))
    logged = tiny.STEPS // every if out and trainer.is_global_zero else 0
    assert own.steps == [every * (i + 1) - 1 for i in range(logged)], "numbered as Lightning numbers its own"
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


# -- conflicts -----------------------------------------------------------------------------------------------------


def _conflicts(directory: str, mode: str, error_on: int | None) -> list[str]:
    """What the monitor says in two fits, or the error."""
    rank = torch.distributed.get_rank()
    error, warning = (next(row for row in CONFLICTS if row.severity == kind) for kind in ("error", "warning"))
    find, said = monitor.find_conflicts, []

    def found(situation: Any) -> list[Conflict]:
        more = [Conflict(warning, "odd")] if rank == 1 else []
        return [*find(situation), *more, *([Conflict(error, "broken")] if rank == error_on else [])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "find_conflicts", found)
        patch.setattr(monitor.log, "warning", lambda text, *args: said.append(text % args))
        watch = MemoryMonitor()
        for _ in range(2):
            trainer = runs.trainer(MCoreTP(tensor_parallel_size=2), mode, callbacks=(watch,), max_steps=1)
            try:
                trainer.fit(TinyModule(directory))
            except ConflictError as conflict:
                assert trainer.global_step == 0
                return [f"raised: {conflict}"]
    return said


def test_warnings_come_once_from_rank_zero(workers: WorkerPool, tiny_llama: Path) -> None:
    first, second = workers(2, _conflicts, str(tiny_llama), "gather", None)
    assert second == []
    assert len(first) == 2
    assert first[0].startswith("gathered inputs kept: 4 site(s) keep")
    assert "on rank" not in first[0]
    assert first[1].startswith("expandable segments unset: odd")
    assert first[1].endswith("(on rank 1)")


def test_an_error_of_one_rank_is_raised_on_all(workers: WorkerPool, tiny_llama: Path) -> None:
    for said in workers(2, _conflicts, str(tiny_llama), "local", 1):
        assert said[0].startswith("raised: NCCL user buffers and expandable segments: broken")
        assert said[0].endswith("(on rank 1)")


# -- out of memory -------------------------------------------------------------------------------------------------


class Greedy(TinyModule):
    """Asks the host for four PiB in its third optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            torch.empty(2**52, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def _out_of_memory(directory: str, out: str) -> list[str]:
    watch = MemoryMonitor(csv=f"{out}/memory.csv", plot=f"{out}/memory.html")
    strategy = MCoreTP(tensor_parallel_size=2)
    trainer = runs.trainer(strategy, "gather", callbacks=(watch,), log_every_n_steps=1)
    with pytest.raises(RuntimeError) as failed:
        trainer.fit(Greedy(directory))
    return failed.value.__notes__


def test_out_of_memory_is_explained(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rank, notes in enumerate(workers(2, _out_of_memory, str(tiny_llama), str(tmp_path))):
        note = next(note for note in notes if "explained by MemoryMonitor" in note)
        assert f"Out of memory on rank {rank}" in note
        assert "4194304.00 GiB more were asked for" in note
        assert "Ranks at step 2:" in note
        sequence = tiny.tokens().shape[1] - 1
        sizes = ParallelSizes(2, 2, True, 1, 2)
        lora = LoRAConfig(rank=tiny.RANK, alpha=tiny.ALPHA, sequence_mode="gather")
        estimate = estimate_memory(
            tiny_llama,
            sizes,
            sequence_length=sequence,
            micro_batch_size=2,
            precision="32-true",
            lora=lora,
            accelerator="cpu",
        )
        assert f"Estimated for 2 x {sequence} tokens: {estimate.total / 2**20:.2f} MiB" in note
        assert "micro batch 1, twice the accumulation: " in note
    with (tmp_path / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert list(rows[0]) == ["step", "memory/peak_rss_gib", "memory/rss_gib", "memory/worst_rank", "rank0", "rank1"]
    for row in rows:
        peaks = [float(row["rank0"]), float(row["rank1"])]
        assert max(peaks) == float(row["memory/peak_rss_gib"])
        assert peaks.index(max(peaks)) == float(row["memory/worst_rank"])
    assert "estimate, most loaded rank" in (tmp_path / "memory.html").read_text(), "drawn although it failed"


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    watch = monitor.Monitor(csv=tmp_path / "file/memory.csv")
    watch.start(None, ParallelSizes(1), torch.device("cpu"), "32-true")
    for step in (1, 2):
        assert watch.read(step)["memory/worst_rank"] == 0
    assert caplog.text.count("neither csv nor snapshots any more on rank 0") == 1


def test_a_plot_that_fails_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    watch = monitor.Monitor(plot=tmp_path / "file/memory.png")  # a folder that cannot be made
    watch.start(None, ParallelSizes(1), torch.device("cpu"), "32-true")
    assert watch.read(1)["memory/worst_rank"] == 0
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
    watch.explain(error, torch.device("cpu"))
    watch.explain(error, torch.device("cpu"))
    watch.close()
    assert "The plot was not drawn" in caplog.text
    assert len(error.__notes__) == 1, "explained once"
    assert "neither a model nor an estimate" in error.__notes__[0]
    assert watch.read(2) == {}, "closed"


def _fabric_out_of_memory(directory: str) -> list[str]:
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2))
    model = runs.model_for_fabric(fabric, directory, "local")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)

    def loop() -> None:
        with FabricMemoryMonitor(fabric, model, every=1, optimizer=optimizer) as watch:
            runs.token_losses(model, tiny.tokens()[:2]).mean()
            watch.step(1)
            torch.empty(2**52, dtype=torch.uint8)

    with pytest.raises(RuntimeError) as failed:
        loop()
    return failed.value.__notes__


def test_out_of_memory_under_fabric(workers: WorkerPool, tiny_llama: Path) -> None:
    for rank, notes in enumerate(workers(2, _fabric_out_of_memory, str(tiny_llama))):
        assert f"Out of memory on rank {rank}, explained" in notes[0]
        assert "Estimated for 2 x" in notes[0]
        assert "optimizer state" not in notes[0], "SGD has none"


def _observed(directory: str) -> tuple[int, list[str]]:
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2))
    model = runs.model_for_fabric(fabric, directory, "local")
    observed = Observed(model, fabric.strategy.parallel.sizes, "32-true", "cpu")
    refusals = []
    for module in (model, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="the m") as refused:
            Observed(module, fabric.strategy.parallel.sizes, "32-true", "cpu").estimate()
        refusals.append(str(refused.value))
    for count in (1, 3, 2):
        runs.token_losses(model, tiny.tokens()[:count])
    runs.token_losses(model.eval(), tiny.tokens()[:4])
    model.train()
    found = observed.estimate()
    observed.close()
    runs.token_losses(model, tiny.tokens()[:4])
    assert observed.estimate().micro_batch_size == found.micro_batch_size == 3, (
        "the largest that trained, until it was closed"
    )
    return found.total, refusals


def test_what_runs_is_estimated(workers: WorkerPool, tiny_llama: Path) -> None:
    total = estimate_memory(
        tiny_llama,
        ParallelSizes(2, 2, True, 1, 2),
        sequence_length=tiny.tokens().shape[1] - 1,
        micro_batch_size=3,
        precision="32-true",
        lora=LoRAConfig(rank=tiny.RANK, alpha=tiny.ALPHA, sequence_mode="local"),
        accelerator="cpu",
    ).total
    for found, refusals in workers(2, _observed, str(tiny_llama)):
        assert found == total
        assert refusals == [
            "the model has not run yet",
            "the module holds none of Megatron-Core's language models",
        ]
