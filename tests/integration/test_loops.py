"""What the Trainer offers around a step: accumulation, limits, stopping, hooks, samplers, logging, callbacks."""

import functools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as plc
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_mcore_lora import MCoreTP
from tests import runs, tiny
from tests.workers import WorkerError, WorkerPool

QUIET = {"num_sanity_val_steps": 0, "gradient_clip_val": None, "accumulate_grad_batches": 1, "max_steps": -1}


class Module(runs.TinyModule):
    """Notes what it sees; 16 samples in batches of one."""

    samples = 16
    sampler: Any = None

    def __init__(self, directory: str) -> None:
        super().__init__(directory, random_factors=False)
        self.seen: dict[str, list[int]] = {"train": [], "validate": [], "predict": []}
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["train"] += batch[1].tolist()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validate"] += batch[1].tolist()
        self.log("val_loss", self(batch[0]).mean(), sync_dist=True, batch_size=len(batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["predict"] += batch[1].tolist()
        return batch[1]

    def train_dataloader(self) -> DataLoader:
        samples = tiny.tokens()[: self.samples]
        return DataLoader(TensorDataset(samples, torch.arange(len(samples))), batch_size=1, sampler=self.sampler)

    val_dataloader = predict_dataloader = train_dataloader


def trainer(tp: int, **kwargs: Any) -> pl.Trainer:
    return runs.trainer(MCoreTP(tensor_parallel_size=tp), "local", **(QUIET | kwargs))


# -- limits ----------------------------------------------------------------------------------------------------


def _limited(directory: str, options: dict[str, Any]) -> tuple[int, int, int]:
    module = Module(directory)
    with_limits = trainer(2, **options)
    with_limits.fit(module)
    return with_limits.global_step, len(module.seen["train"]), len(module.seen["validate"])


@pytest.mark.parametrize(
    ("options", "expected"),  # steps, training batches, validation batches of this rank; 8 batches an epoch
    [
        ({"max_epochs": 1, "accumulate_grad_batches": 3}, (3, 8, 8)),
        pytest.param({"max_steps": 3, "accumulate_grad_batches": 2}, (3, 6, 0), marks=pytest.mark.full),
        ({"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1}, (4, 4, 2)),
        ({"max_epochs": 1, "val_check_interval": 4, "limit_val_batches": 2}, (8, 8, 4)),
        pytest.param({"max_epochs": 2, "overfit_batches": 2}, (4, 4, 4), marks=pytest.mark.full),
        ({"fast_dev_run": 2}, (2, 2, 2)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_limits(workers: WorkerPool, tiny_llama: Path, options: Any, expected: Any) -> None:
    assert workers(4, _limited, str(tiny_llama), options) == [expected] * 4


class Stop(Module):
    """A metric that only one rank finds bad."""

    worst = 9.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        bad = self.trainer.global_rank == 3 and self.trainer.global_step >= 2
        self.log("metric", torch.tensor(self.worst if bad else -1.0 * self.trainer.global_step), batch_size=1)


def _stops(directory: str, worst: float) -> int:
    module = Stop(directory)
    module.worst = worst
    stopping = plc.EarlyStopping("metric", patience=1, check_finite=True)
    with_stop = trainer(2, max_steps=8, val_check_interval=2, limit_val_batches=1, callbacks=(stopping,))
    with_stop.fit(module)
    return with_stop.global_step


@pytest.mark.parametrize("worst", [9.0, float("nan")])
def test_one_ranks_early_stop_stops_all(workers: WorkerPool, tiny_llama: Path, worst: float) -> None:
    steps = set(workers(4, _stops, str(tiny_llama), worst))
    assert len(steps) == 1
    assert steps.pop() < 5


class NotANumber(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.strategy.parallel.dp_rank == 1 and batch_idx == 1 else loss


def _nan(directory: str) -> list[bool]:
    module = NotANumber(directory)
    trainer(2, max_steps=2, gradient_clip_val=1.0).fit(module)
    return [p.isnan().all().item() for p in runs.factors_of(module.model).values()]


def test_not_a_number_on_one_rank_is_on_all(workers: WorkerPool, tiny_llama: Path) -> None:
    assert all(all(rank) for rank in workers(4, _nan, str(tiny_llama)))


# -- hooks -----------------------------------------------------------------------------------------------------


class Hooks(Module):
    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.random_factors = True
        self.at: dict[str, list[Tensor]] = {"backward": [], "step": [], "clip": []}

    def _note(self, place: str) -> None:
        grads = [p.grad for p in runs.factors_of(self.model).values()]
        self.at[place].append(torch.cat([g.detach().flatten() for g in grads]).clone())

    def on_after_backward(self) -> None:
        self._note("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note("step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-2, gradient_clip_algorithm="norm")
        self.norm = runs.global_grad_norm(self.parameters()).item()
        self.clip_gradients(optimizer, gradient_clip_val=1e-5, gradient_clip_algorithm="value")
        self._note("clip")


def _hooks(directory: str, accumulate: int) -> dict[str, Any]:
    module = Hooks(directory)
    trainer(1, max_steps=2, accumulate_grad_batches=accumulate).fit(module)
    return {"at": module.at, "norm": module.norm}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_see_reduced_gradients(workers: WorkerPool, tiny_llama: Path, accumulate: int) -> None:
    one, other = workers(2, _hooks, str(tiny_llama), accumulate)
    for place in ("step", "clip"):
        assert all(torch.equal(a, b) for a, b in zip(one["at"][place], other["at"][place], strict=True))
    last = one["at"]["backward"][accumulate - 1 :: accumulate]
    assert all(torch.equal(a, b) for a, b in zip(last, one["at"]["step"], strict=True))
    if accumulate == 2:  # what a rank has gathered so far is its own
        assert not torch.equal(one["at"]["backward"][0], other["at"]["backward"][0])
    assert one["norm"] == pytest.approx(1e-2, rel=1e-3)
    assert one["at"]["clip"][0].abs().max() == torch.tensor(1e-5)


class Manual(Module):
    """Its own loop: two backwards a step, weighted by tokens or by itself."""

    how = "by tokens"
    norm = 0.0

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.automatic_optimization, self.random_factors = False, True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, (samples, _) = self.optimizers(), batch
        for mask in (torch.arange(tiny.SEQUENCE) < 9, torch.arange(tiny.SEQUENCE) >= 9):
            loss = (self(samples) * mask).sum()
            if self.how != "plain":
                self.manual_backward(loss, num_tokens=int(mask.sum()) * len(samples))
            else:
                self.manual_backward(loss / (tiny.SEQUENCE * len(samples)))
        self.grad = torch.cat([p.grad.flatten() for p in runs.factors_of(self.model).values()]).clone()
        if self.how == "clipped":
            self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
            self.norm = runs.global_grad_norm(self.parameters()).item()
        optimizer.step()
        optimizer.zero_grad()


def _manual(directory: str, tp: int, how: str) -> list[Tensor]:
    module = (Hooks if how == "automatic" else Manual)(directory)
    module.how = how
    if how == "automatic":
        module.configure_gradient_clipping = lambda *args, **kwargs: None  # type: ignore[method-assign]
    trainer(tp, max_steps=2).fit(module)
    return [p.detach().clone() for p in runs.factors_of(module.model).values()]


def _manual_clip(directory: str) -> tuple[float, list[Tensor]]:
    module = Manual(directory)
    module.how = "clipped"
    trainer(2, max_steps=2).fit(module)
    return module.norm, [p.detach().clone() for p in runs.factors_of(module.model).values()]


def test_manual_clipping_is_of_reduced_gradients(workers: WorkerPool, tiny_llama: Path) -> None:
    ranks = workers(4, _manual_clip, str(tiny_llama))
    assert [norm for norm, _ in ranks] == pytest.approx([1e-3] * 4, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][1], ranks[2][1], strict=True)), "replicas stay alike"


def test_manual_optimization(workers: WorkerPool, tiny_llama: Path) -> None:
    automatic, *manual = (
        workers(2, _manual, str(tiny_llama), 1, how)[0] for how in ("automatic", "by tokens", "plain")
    )
    for factors in manual:
        for one, other in zip(automatic, factors, strict=True):
            assert torch.allclose(one, other, atol=2e-6)


# -- data ------------------------------------------------------------------------------------------------------


class Odd(Module):
    samples = 7


def _predict(directory: str) -> dict[str, Any]:
    module = Odd(directory)
    with_predict = trainer(2, max_steps=1)
    first = torch.cat(with_predict.predict(module)).tolist()  # before any fit
    with_predict.fit(module)
    again = torch.cat(with_predict.predict(module)).tolist()
    return {"dp": with_predict.strategy.parallel.dp_rank, "first": first, "again": again}


def test_predict_returns_each_sample_once(workers: WorkerPool, tiny_llama: Path) -> None:
    ranks = workers(4, _predict, str(tiny_llama))
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert sorted(ranks[0]["first"] + ranks[2]["first"]) == list(range(7))
    assert ranks[0]["again"] == ranks[0]["first"]


class Sampled(Module):
    """A sampler of the user's that draws from the default stream, which replicas do not share."""

    sampler = SubsetRandomSampler(range(10))


def _sampled(directory: str) -> list[list[int]]:
    module = Sampled(directory)
    trainer(2, max_epochs=2).fit(module)
    return [module.seen["train"][:5], module.seen["train"][5:]]


@pytest.mark.full
def test_users_sampler_is_divided(workers: WorkerPool, tiny_llama: Path) -> None:
    ranks = workers(4, _sampled, str(tiny_llama))
    assert ranks[0] == ranks[1]
    for epoch in (0, 1):
        assert sorted(ranks[0][epoch] + ranks[2][epoch]) == list(range(10)), "each sample once"
    assert ranks[0][0] != ranks[0][1], "each epoch another order"


class Stream(IterableDataset):
    """Each data-parallel rank takes its part; the second has fewer."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def __iter__(self) -> Any:
        parallel = self.strategy.parallel
        for i in range(parallel.dp_rank, 9 - 4 * parallel.dp_rank, parallel.sizes.data):
            yield tiny.tokens()[i], i


class Streaming(Module):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(self.trainer.strategy), batch_size=1)

    val_dataloader = train_dataloader


def _stream(directory: str) -> dict[str, Any]:
    module = Streaming(directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_stream = trainer(2, max_epochs=2)
        with_stream.fit(module)
    texts = " ".join(str(w.message) for w in caught)
    return {"seen": module.seen, "warned": texts, "steps": with_stream.global_step}


def test_streams_end_together(workers: WorkerPool, tiny_llama: Path) -> None:
    ranks = workers(4, _stream, str(tiny_llama))
    assert {rank["steps"] for rank in ranks} == {4}, "the shorter has two a rank and epoch"
    assert ranks[0]["seen"]["train"] == ranks[1]["seen"]["train"] == [0, 2, 0, 2]
    assert ranks[2]["seen"]["train"] == [1, 3, 1, 3]
    assert len(ranks[0]["seen"]["validate"]) > len(ranks[2]["seen"]["validate"]), "validation reads all there is"
    assert "rank(s) [2, 3] ran out of data before others" in ranks[0]["warned"]
    assert "Stream is an IterableDataset, which no sampler divides" in ranks[0]["warned"]


class Uneven(Module):
    def train_dataloader(self) -> DataLoader:
        count = 4 + self.trainer.strategy.parallel.dp_rank
        return DataLoader(TensorDataset(tiny.tokens()[:count], torch.arange(count)), batch_size=1)


def _uneven(directory: str) -> None:
    trainer(1, max_epochs=1, use_distributed_sampler=False, limit_val_batches=0).fit(Uneven(directory))


def test_uneven_lengths_are_refused_on_all_ranks(workers: WorkerPool, tiny_llama: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"(?s)rank 0: DataLengthError: batches of an epoch by rank: \[4, 5\].*rank 1: D"
    ):
        workers(2, _uneven, str(tiny_llama))


# -- logging ---------------------------------------------------------------------------------------------------


class Logs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index = batch[1].float().sum()
        self.log("mean", index, sync_dist=True, on_step=False, on_epoch=True, batch_size=1)
        self.log("sum", index, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=1)
        self.log("largest", index, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True, batch_size=1)
        self.log("step", index, sync_dist=True)
        return super().training_step(batch, batch_idx)


def _logs(directory: str, out: str) -> dict[str, float]:
    monitor = plc.LearningRateMonitor("step")
    logger = CSVLogger(out, name="log", version=0)
    with_logs = trainer(2, max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=(monitor, plc.Timer()))
    with_logs.fit(Logs(directory))
    return {name: value.item() for name, value in with_logs.callback_metrics.items()}


def test_logged_values_are_of_all_samples(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    for metrics in workers(4, _logs, str(tiny_llama), str(tmp_path)):
        assert metrics["sum"] == sum(range(16))
        assert metrics["mean"] == sum(range(16)) / 16
        assert metrics["largest"] == 15
    header, *rows = (tmp_path / "log/version_0/metrics.csv").read_text().splitlines()
    column = header.split(",").index("lr-AdamW")
    assert {row.split(",")[column] for row in rows} >= {"0.001"}


# -- callbacks -------------------------------------------------------------------------------------------------


class Thaw(plc.BaseFinetuning):
    """Unfreezes in the middle of a fit."""

    def freeze_before_training(self, pl_module: Any) -> None: ...

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.model.decoder.final_layernorm, optimizer)


REFUSED = {
    "SWA": lambda: plc.StochasticWeightAveraging(1e-2),
    "EMA": lambda: plc.EMAWeightAveraging(),
    "exception": lambda: plc.OnExceptionCheckpoint("."),
    "saves on exception": lambda: plc.ModelCheckpoint(save_on_exception=True),
    "pruning": lambda: plc.ModelPruning("l1_unstructured", amount=0.5),
    "thaw": Thaw,
}


def _refused(directory: str, name: str) -> None:
    saves = "exception" in name
    trainer(1, max_epochs=2, callbacks=(REFUSED[name](),), enable_checkpointing=saves).fit(Module(directory))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("SWA", "StochasticWeightAveraging is not supported by MCoreTP: it copies the whole model"),
        ("EMA", "EMAWeightAveraging is not supported by MCoreTP: it copies the whole model"),
        ("exception", "OnExceptionCheckpoint is not supported by MCoreTP: an exception comes to one rank"),
        (
            "saves on exception",
            r"ModelCheckpoint\(save_on_exception=True\) is not supported .* use every_n_train_steps",
        ),
        ("pruning", "ModelPruning is not supported by MCoreTP"),
        ("thaw", r"AdamW holds 1 trainable parameter\(s\) whose gradients are not reduced: .* Unfreeze before"),
    ],
)
def test_callbacks_that_do_not_fit_are_refused(workers: WorkerPool, tiny_llama: Path, name: str, match: str) -> None:
    with pytest.raises(WorkerError, match=match):
        workers(1, _refused, str(tiny_llama), name)


def _callbacks(directory: str, out: str) -> dict[str, Any]:
    schedule = plc.GradientAccumulationScheduler({0: 2, 1: 4})
    checkpoints = plc.ModelCheckpoint(out, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    with_callbacks = trainer(
        2,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=(schedule, checkpoints, plc.DeviceStatsMonitor(), plc.ModelSummary(), plc.RichProgressBar()),
        logger=CSVLogger(out, name="log", version=0),
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    module = Module(directory)
    with_callbacks.fit(module)
    best = with_callbacks.validate(module, ckpt_path="best", verbose=False)[0]["val_loss"]
    return {"steps": with_callbacks.global_step, "best": best, "score": checkpoints.best_model_score.item()}


@pytest.mark.full
def test_callbacks_that_fit(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    for rank in workers(4, _callbacks, str(tiny_llama), str(tmp_path)):
        assert rank["steps"] == 4 + 2 + 2
        assert rank["best"] == pytest.approx(rank["score"], rel=1e-6)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


def _tuned(directory: str, out: str) -> tuple[float, float]:
    module = Module(directory)
    module.lr = 1e-3
    module.configure_optimizers = functools.partial(_at_rate, module)  # type: ignore[method-assign]
    tuned = trainer(2, max_epochs=1, default_root_dir=out)
    Tuner(tuned).lr_find(module, num_training=4, min_lr=1e-5, max_lr=1e-2, early_stop_threshold=None)
    found = module.lr
    tuned.fit(module)
    return found, tuned.global_step


def _at_rate(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=module.lr)


@pytest.mark.full
def test_learning_rate_finder(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    assert len(set(workers(2, _tuned, str(tiny_llama), str(tmp_path)))) == 1
