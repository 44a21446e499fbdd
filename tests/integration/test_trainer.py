"""MCoreTP as a Lightning strategy: seeds, samplers, reductions, every entry point, errors before the first step."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_mcore_lora import LoRASPCallback, MCoreTP, MemoryMonitor
from lightning_mcore_lora.checkpoint.tensors import check_can_save
from lightning_mcore_lora.strategy.loaders import ResumableLoader
from lightning_mcore_lora.strategy.seeding import get_random_state, set_random_state
from tests import runs, tiny
from tests.workers import WorkerError, WorkerPool

CPU = torch.device("cpu")


class Module(runs.TinyModule):
    """Also validates, tests and predicts."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.seen: dict[str, list[int]] = {}
        self.draws: dict[str, float] = {}

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.mean = MeanMetric(process_group=self.trainer.strategy.data_parallel_group)

    def on_train_start(self) -> None:
        from megatron.core.tensor_parallel import random

        self.draws["default"] = torch.rand(()).item()
        with random.get_cuda_rng_tracker().fork():
            self.draws["model"] = torch.rand(()).item()

    def _see(self, stage: str, batch: Any) -> torch.Tensor:
        samples, index = batch
        self.seen.setdefault(stage, []).extend(index.tolist())
        return self(samples).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.setdefault("train", []).extend(batch[1].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._see("validate", batch)
        self.mean.update(loss, len(batch[1]))
        self.log("val_mean", self.mean, batch_size=len(batch[1]))
        self.log("val_reduced", loss, sync_dist=True, batch_size=len(batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._see("test", batch), sync_dist=True, batch_size=len(batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._see("predict", batch)

    def _loader(self) -> DataLoader:
        samples = tiny.tokens()[:8]
        return DataLoader(TensorDataset(samples, torch.arange(8)), batch_size=2)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def _every_entry(directory: str, tp: int) -> dict[str, Any]:
    strategy = MCoreTP(tensor_parallel_size=tp)
    trainer = runs.trainer(strategy, "local", max_steps=2, num_sanity_val_steps=0)
    module = Module(directory)
    before = trainer.validate(module, verbose=False)[0]
    trainer.fit(module)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad and p.grad is not None]
    assert not frozen
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in module.parameters() if p.requires_grad}, "optimizers see adapters only"
    after = trainer.validate(module, verbose=False)[0]
    test = trainer.test(module, verbose=False)[0]
    trainer.predict(module)
    losses = [list(module.losses)]
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)  # goes on
    losses.append(module.losses[len(losses[0]) :])
    from lightning_mcore_lora import cpu_backend

    assert not cpu_backend.is_active(), "teardown undoes the backend"
    flags = [strategy.reduce_boolean_decision(strategy.global_rank == 0, all=every) for every in (True, False)]
    return {
        "seen": module.seen,
        "draws": module.draws,
        "before": before,
        "after": after,
        "test": test,
        "losses": losses,
        "flags": flags,
        "ranks": (strategy.parallel.tp_rank, strategy.parallel.dp_rank),
        "summed": strategy.reduce(torch.tensor(float(strategy.global_rank)), reduce_op="sum").item(),
        "broadcast": strategy.broadcast(strategy.global_rank, src=1),
        "unknown": _message(lambda: strategy.reduce(torch.ones(1), reduce_op="most")),
    }


def _message(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def test_every_entry_point(workers: WorkerPool, tiny_llama: Path) -> None:
    ranks = workers(4, _every_entry, str(tiny_llama), 2)
    by_rank = {rank["ranks"]: rank for rank in ranks}
    assert sorted(by_rank) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for dp in (0, 1):
        # Tensor-parallel peers see the same samples; data-parallel ranks share them out.
        one, other = by_rank[0, dp], by_rank[1, dp]
        assert one["seen"] == other["seen"]
        assert one["losses"] == other["losses"]
        # and draw the same in replicated regions, another number in sharded ones.
        assert one["draws"]["default"] == other["draws"]["default"]
        assert one["draws"]["model"] != other["draws"]["model"]
    zero, one = by_rank[0, 0], by_rank[0, 1]
    assert zero["draws"]["default"] != one["draws"]["default"], "replicas drop out differently"
    assert zero["draws"]["model"] != one["draws"]["model"]
    for stage in ("validate", "test", "predict"):
        seen = zero["seen"][stage] + one["seen"][stage]
        assert {seen.count(i) for i in range(8)} == {len(seen) // 8}, "each sample as often as any other"
    assert len(zero["seen"]["predict"]) == 4
    assert not set(zero["seen"]["train"][:4]) & set(one["seen"]["train"][:4])
    for rank in ranks:
        assert rank["before"] == ranks[0]["before"]
        assert rank["after"] == ranks[0]["after"]
        assert rank["after"]["val_mean"] == pytest.approx(rank["after"]["val_reduced"], rel=1e-6)
        assert rank["after"]["val_mean"] == pytest.approx(rank["test"]["test_loss"], rel=1e-6)
        assert rank["after"]["val_mean"] != rank["before"]["val_mean"]
        assert rank["flags"] == [False, True]
        assert rank["broadcast"] == 1
        assert rank["unknown"].startswith("reduce_op='most' must be one of")
    assert [rank["summed"] for rank in ranks] == [2.0, 4.0, 2.0, 4.0], "over the data-parallel group"


def _worker_seeds() -> tuple[int, int]:
    os.environ["PL_SEED_WORKERS"] = "1"
    try:
        strategy = MCoreTP(tensor_parallel_size=2)
        trainer = runs.trainer(strategy, "local")
        strategy.setup_environment()
        module = pl.LightningModule()
        module.trainer = trainer
        strategy.connect(module)
        loader = DataLoader(TensorDataset(torch.ones(4)), batch_size=2)
        strategy.process_dataloader(loader)
        return strategy.parallel.dp_rank, loader.worker_init_fn.keywords["rank"]
    finally:
        del os.environ["PL_SEED_WORKERS"]
        strategy.teardown()


def test_loader_workers_are_seeded_by_data_parallel_rank(workers: WorkerPool) -> None:
    assert workers(4, _worker_seeds) == [(0, 0), (0, 0), (1, 1), (1, 1)]


class Noisy(torch.utils.data.Dataset):
    """Draws from the global random state, as augmentation does."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        return i + torch.rand(())


def test_resumable_loader_continues_order_and_draws() -> None:
    torch.manual_seed(1)
    loader = ResumableLoader(DataLoader(Noisy(), batch_size=1, shuffle=True), CPU, lambda: 3, 1)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
        torch.rand(5)  # the step's dropout
    place, start, now = loader.state_dict(), loader.epoch_start, get_random_state()
    straight = [batch.item() for batch in iterator], torch.rand(()).item()

    torch.manual_seed(99)  # another process
    other = ResumableLoader(DataLoader(Noisy(), batch_size=1, shuffle=True), CPU, lambda: 0, 1)
    other.load_state_dict(place)
    other.epoch_start = start
    set_random_state(now)
    assert ([batch.item() for batch in other], torch.rand(()).item()) == straight


def test_resumable_loader_at_an_epochs_end() -> None:
    position = {"consumed": 2}
    loader = ResumableLoader(DataLoader(Noisy(), batch_size=4), CPU, lambda: position["consumed"], 1)
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 2, "the next epoch begins whole"
    position["consumed"] = 1
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 1
    assert len(list(loader)) == 2
    assert (loader.batch_size, len(loader)) == (4, 2)


def test_resumable_loader_continues_after_the_same_samples() -> None:
    saved = ResumableLoader(DataLoader(Noisy(), batch_size=1), CPU, lambda: 3, 2).state_dict()
    other = ResumableLoader(DataLoader(Noisy(), batch_size=2), CPU, lambda: 0, 1)
    other.load_state_dict(saved)
    assert other.skip == 3, "three batches on two replicas are six samples"
    with pytest.raises(ValueError, match=r"6 samples of the epoch were read, and 4 are read at once now"):
        ResumableLoader(DataLoader(Noisy(), batch_size=4), CPU, lambda: 0, 1).load_state_dict(saved)


# -- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "trainer", "match"),
    [
        ({"tensor_parallel_size": 3}, {}, "world_size=2 is not divisible by tensor_parallel_size=3"),
        ({"tensor_parallel_size": 1, "sequence_parallel": True}, {}, "sequence_parallel=True needs"),
    ],
)
def test_sizes_are_refused_before_any_process_starts(strategy: Any, trainer: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pl.Trainer(accelerator="cpu", devices=2, strategy=MCoreTP(**strategy), logger=False, **trainer)


def test_groups_before_set_up_are_explained() -> None:
    with pytest.raises(RuntimeError, match=r"they exist from LightningModule.configure_model on"):
        MCoreTP().parallel  # noqa: B018


def test_registered_by_name() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="mcore_tp", logger=False)
    assert isinstance(trainer.strategy, MCoreTP)


def _refuse(directory: str, case: str) -> None:
    strategy = MCoreTP(tensor_parallel_size=1)
    module = Module(directory)
    options: dict[str, Any] = {"max_steps": 1, "num_sanity_val_steps": 0}
    if case == "no adapters":
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, **options)
        module.requires_grad_(False)
        module.configure_model = lambda: (Module.configure_model(module), module.requires_grad_(False))  # type: ignore
    elif case == "two optimizers":
        trainer = runs.trainer(strategy, "local", gradient_clip_val=None, accumulate_grad_batches=1, **options)
        module.automatic_optimization = False
        module.configure_optimizers = lambda: [torch.optim.SGD(module.parameters(), lr=1.0) for _ in range(2)]  # type: ignore
    elif case == "distributed optimizer":
        trainer = runs.trainer(strategy, "local", **options)
        module.configure_optimizers = lambda: object.__new__(DistributedOptimizer)  # type: ignore
    elif case == "ZeRO":
        trainer = runs.trainer(strategy, "local", **options)
        module.configure_optimizers = lambda: ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)  # type: ignore
    elif case == "LBFGS":
        trainer = runs.trainer(strategy, "local", **options)
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore
    elif case == "precision":
        trainer = runs.trainer(strategy, "local", precision="64-true", **options)
    elif case == "other strategy":
        trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[LoRASPCallback()], logger=False, **options)
    elif case == "no model":
        trainer = runs.trainer(strategy, "local", **options)
        module.configure_model = lambda: None  # type: ignore
    elif case == "mixed losses":
        trainer = runs.trainer(strategy, "local", **options)
        plain = module.training_step

        def sometimes(batch: Any, batch_idx: int) -> Any:
            loss = plain(batch, batch_idx)
            return {"loss": loss, "num_tokens": 3} if batch_idx else loss

        module.training_step = sometimes  # type: ignore
    trainer.fit(module)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("no adapters", r"Module has no trainable parameter: add LoRASPCallback\(\)"),
        ("two optimizers", "configure_optimizers returned 2 optimizers"),
        ("distributed optimizer", "Megatron-Core's optimizers are not supported by MCoreTP: it scales, reduces, clips"),
        ("ZeRO", "ZeroRedundancyOptimizer is not supported by MCoreTP: each rank would hold, and save, the state"),
        ("LBFGS", "LBFGS is not supported by MCoreTP: it runs its closure several times a step"),
        ("precision", "precision='64-true' is not supported by MCoreTP: use one of"),
        ("other strategy", r"LoRASPCallback needs Trainer\(strategy=MCoreTP\(...\)\), not SingleDeviceStrategy"),
        ("no model", "holds none of Megatron-Core's parallel linears: build it before"),
        ("mixed losses", "num_tokens was given for some microbatches .* and not for others"),
    ],
)
def test_refused_with_the_fix(workers: WorkerPool, tiny_llama: Path, case: str, match: str) -> None:
    with pytest.raises(WorkerError, match=match):
        workers(1, _refuse, str(tiny_llama), case)


def test_trainable_grouped_experts_are_refused() -> None:
    layer = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"linear_fc1": torch.nn.Linear(1, 1, bias=False)})})
    module = torch.nn.ModuleDict({"mlp": layer})
    with pytest.raises(NotImplementedError, match=r"training grouped expert weights .* freeze \['mlp.experts.linear"):
        check_can_save(module, everything=False)
    module.requires_grad_(False)
    check_can_save(module, everything=False)
    with pytest.raises(NotImplementedError, match=r"saving grouped expert weights .* leave save_base_weights out"):
        check_can_save(module, everything=True)


def _validate_from(directory: str, out: str) -> tuple[float, float, bool, list[float]]:
    options: dict[str, Any] = {"max_steps": 1, "num_sanity_val_steps": 0}
    trainer = runs.trainer(MCoreTP(tensor_parallel_size=2), "local", **options)
    module = Module(directory)
    trainer.fit(module)
    trained = trainer.validate(module, verbose=False)[0]["val_mean"]
    trainer.strategy.setup_environment()
    trainer.save_checkpoint(out)
    trainer.strategy.teardown()
    other = runs.trainer(MCoreTP(tensor_parallel_size=2), "local", **options)
    fresh = Module(directory)
    loaded = other.validate(fresh, ckpt_path=out, verbose=False)[0]["val_mean"]
    kept = other.strategy.engine._to_continue is not None
    other.fit(fresh)
    return trained, loaded, kept, [module.draws["default"], fresh.draws["default"]]


def test_validate_from_a_checkpoint(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    for trained, loaded, kept, draws in workers(2, _validate_from, str(tiny_llama), str(tmp_path / "adapter.ckpt")):
        assert loaded == trained
        assert not kept, "streams of a checkpoint that was only looked at must not reach a later fit"
        assert draws[0] == draws[1]


# -- bf16-mixed, memory --------------------------------------------------------------------------------------


def _mixed(directory: str, tp: int, precision: str) -> list[float]:
    module = Module(directory)
    trainer = runs.trainer(MCoreTP(tensor_parallel_size=tp), "regather" if tp > 1 else "local", precision=precision)
    trainer.fit(module)
    assert all(p.dtype == torch.float32 for p in module.parameters())
    return module.losses


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_bf16_mixed_runs_near_float32(workers: WorkerPool, tiny_llama: Path, tp: int) -> None:
    exact, mixed = (workers(tp, _mixed, str(tiny_llama), tp, p)[0] for p in ("32-true", "bf16-mixed"))
    assert mixed != exact
    assert max(abs(a - b) / b for a, b in zip(mixed, exact, strict=True)) < 0.01


def _monitor(directory: str, out: str) -> float:
    import resource

    trainer = runs.trainer(
        MCoreTP(tensor_parallel_size=2),
        "local",
        callbacks=(MemoryMonitor(),),
        logger=CSVLogger(out, name="log", version=0),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(Module(directory))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def test_memory_monitor_logs_the_worst_rank(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    import csv

    peaks = workers(2, _monitor, str(tiny_llama), str(tmp_path))
    with (tmp_path / "log/version_0/metrics.csv").open() as file:
        values = [float(row["memory/peak_rss_gib"]) for row in csv.DictReader(file) if row["memory/peak_rss_gib"]]
    assert len(values) == tiny.STEPS
    assert values == sorted(values)
    assert 0.1 < values[-1] <= max(peaks) * 1.001
    assert values[-1] > 0.95 * max(peaks)
