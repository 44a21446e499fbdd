"""Checkpoints as people use them: Lightning's callback in its forms, every entry point, Fabric, and alone."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore_lora import (
    LoRAConfig,
    LoRASPCallback,
    MCoreTP,
    apply_lora,
    build_gpt_model,
    load_checkpoint,
    load_hf_weights,
)
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
from tests import runs, tiny
from tests.launch import free_port
from tests.workers import WorkerError, WorkerPool


class Module(runs.TinyModule):
    """Validates after each epoch; the loss is worse in each, so that the first is the best."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.read: list[int] = []
        self.register_buffer("nothing", torch.empty(0))
        for name in ("complex64", "float8_e4m3fn", "uint16"):
            self.register_buffer(name, torch.ones(2, 3).to(getattr(torch, name)))
        self.weighted = torch.nn.CrossEntropyLoss(weight=torch.ones(3))  # has a persistent buffer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(batch[1][0].item())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).mean()
        self.log("loss", loss, sync_dist=True)
        self.log("worse", torch.tensor(float(self.trainer.current_epoch)))
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).mean()

    def val_dataloader(self) -> Any:
        return runs.loader(self.trainer.strategy)

    test_dataloader = predict_dataloader = val_dataloader


def _trainer(tp: int = 2, callbacks: tuple = (), strategy: dict[str, Any] | None = None, **options: Any) -> Any:
    defaults = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 1}
    defaults |= {"accumulate_grad_batches": 1, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    mode = options.pop("mode", "local")
    made = MCoreTP(tensor_parallel_size=tp, **(strategy or {}))
    return runs.trainer(made, mode, callbacks=callbacks, **(defaults | options))


def factors(module: Any) -> dict[Any, torch.Tensor]:
    """This rank's factors."""
    return {key: p.detach().clone() for key, p in runs.factors_of(module).items()}


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    """Whether all are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


# -- Lightning's callback --------------------------------------------------------------------------------------


def _callback(directory: str, out: str, link: bool) -> dict[str, Any]:
    best = ModelCheckpoint(f"{out}/best", "{epoch}", monitor="worse", save_top_k=3, save_last="link" if link else True)
    few = ModelCheckpoint(f"{out}/few", "{epoch}", monitor="worse", mode="max", save_top_k=1)
    often = ModelCheckpoint(f"{out}/often", "{step}", every_n_train_steps=5, save_top_k=-1)
    light = ModelCheckpoint(f"{out}/light", "weights", save_weights_only=True, every_n_epochs=3)
    trainer = _trainer(callbacks=(best, few, often, light))
    module = Module(directory)
    trainer.fit(module)
    ended = factors(module.model)
    values = {"best": best.best_model_path, "last": best.last_model_path, "monitored": sorted(best.best_k_models)}
    for entry in ("validate", "test"):
        result = getattr(trainer, entry)(module, ckpt_path="last", verbose=False)[0]["loss"]
        fresh = Module(directory)
        other = getattr(_trainer(), entry)(fresh, ckpt_path=best.last_model_path, verbose=False)[0]["loss"]
        assert result == other
        assert same(factors(fresh.model), ended)
    fresh = Module(directory)
    _trainer().predict(fresh, ckpt_path=best.best_model_path)
    assert not same(factors(fresh.model), ended), "the first epoch's are others"
    again = Module(directory)
    more = _trainer(callbacks=(ModelCheckpoint(f"{out}/best", save_last=True),), max_epochs=4)
    more.fit(again, ckpt_path="last")
    return values | {"steps": len(again.losses), "epoch": more.current_epoch}


@pytest.mark.parametrize("link", [pytest.param(False, marks=pytest.mark.full), True])
def test_model_checkpoint(workers: WorkerPool, tiny_llama: Path, tmp_path: Path, link: bool) -> None:
    for values in workers(2, _callback, str(tiny_llama), str(tmp_path), link):
        assert Path(values["best"]).name == "epoch=0.ckpt"
        assert [Path(path).name for path in values["monitored"]] == [f"epoch={i}.ckpt" for i in range(3)]
        assert (values["steps"], values["epoch"]) == (4, 4), "the run went on after its third epoch"
    kept = {folder: sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("few", "often", "light")}
    assert kept == {"few": ["epoch=2.ckpt"], "often": ["step=10.ckpt", "step=5.ckpt"], "light": ["weights.ckpt"]}
    assert (tmp_path / "best" / "last.ckpt").exists()
    manifest = json.loads((tmp_path / "light" / "weights.ckpt" / "manifest.json").read_text())
    assert (manifest["step"], manifest["optimizer"], manifest["weights"]) == (12, False, "trained")


class Estimating(Module):
    """Has the Trainer make its loaders before it reads the checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Stream(torch.utils.data.IterableDataset):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter((tokens, torch.tensor(i)) for i, tokens in enumerate(tiny.tokens()))


class Streaming(Module):
    """Reads a stream; the same on both ranks."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Stream(), batch_size=2)


def _goes_on(kind: Any, directory: str, out: str, options: dict[str, Any], ckpt: str | None) -> Any:
    saver = ModelCheckpoint(out, "saved", save_top_k=1, **options["save"])
    module = kind(directory)
    options = {name: value for name, value in options.items() if name != "save"}
    _trainer(callbacks=(saver,), **options).fit(module, ckpt_path=ckpt)
    return module.read, module.losses, factors(module.model)


EPOCHS, STEPS = {"max_epochs": 3}, {"max_epochs": -1, "max_steps": 12}
#: What ends the run that is saved, what ends the whole, when it is saved, and how many batches are left.
STOPS = {
    "an epoch's end": ({"max_epochs": 1}, EPOCHS, {"every_n_epochs": 1}, 8),
    "an epoch's end before validation": (
        {"max_epochs": 1},
        EPOCHS,
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        8,
    ),
    "an epoch's last step": ({"max_epochs": 1}, EPOCHS, {"every_n_train_steps": 4}, 8),
    "max_steps at an epoch's end": ({"max_epochs": -1, "max_steps": 4}, STEPS, {"every_n_epochs": 1}, 8),
    "max_steps at an epoch's end before validation": (
        {"max_epochs": -1, "max_steps": 4},
        STEPS,
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        8,
    ),
    "max_steps at an epoch's last step": ({"max_epochs": -1, "max_steps": 4}, STEPS, {"every_n_train_steps": 4}, 8),
    "max_steps inside an epoch": (
        {"max_epochs": -1, "max_steps": 6},
        STEPS,
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        6,
    ),
    "a step inside an epoch": ({"max_epochs": 2}, EPOCHS, {"every_n_train_steps": 6}, 6),
    "max_steps at a step": ({"max_epochs": -1, "max_steps": 6}, STEPS, {"every_n_train_steps": 6}, 6),
    "validation inside an epoch": (
        {"max_epochs": -1, "max_steps": 3, "val_check_interval": 2},
        STEPS | {"val_check_interval": 2},
        {"monitor": "worse"},
        10,
    ),
    # Validation runs, and saves, after three microbatches, of which the third belongs to a step that was not taken.
    "inside an optimizer step": (
        {"max_epochs": -1, "max_steps": 2, "val_check_interval": 3, "accumulate_grad_batches": 2},
        {"max_epochs": -1, "max_steps": 6, "val_check_interval": 3, "accumulate_grad_batches": 2},
        {"monitor": "worse"},
        10,
    ),
}
QUICK = {"max_steps inside an epoch", "inside an optimizer step"}


@pytest.mark.parametrize(
    ("stop", "kind"),
    [pytest.param(name, Module, marks=[] if name in QUICK else pytest.mark.full) for name in STOPS]
    + [("a step inside an epoch", Estimating)]
    + [pytest.param(name, kind, marks=pytest.mark.full) for name in STOPS for kind in (Estimating, Streaming)],
)
def test_goes_on_from(workers: WorkerPool, tiny_llama: Path, tmp_path: Path, stop: str, kind: Any) -> None:
    first, whole, save, left = STOPS[stop]
    run = (2, _goes_on, kind, str(tiny_llama))
    straight = workers(*run, str(tmp_path / "straight"), whole | {"save": save}, None)
    workers(*run, str(tmp_path / "first"), first | {"save": save}, None)
    rest = workers(*run, str(tmp_path / "rest"), whole | {"save": save}, str(tmp_path / "first" / "saved.ckpt"))
    for (read, losses, ended), (read_on, losses_on, ended_on) in zip(straight, rest, strict=True):
        assert read_on == read[-left:]
        assert losses_on == losses[-left:]
        assert same(ended, ended_on)


class _Look(pl.Callback):
    """What is there after each step."""

    def __init__(self, out: str) -> None:
        self.out = Path(out)
        self.found: list[set[str]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if self.out.exists():
            self.found.append({path.name for path in self.out.iterdir() if not path.name.startswith(".")})


def _removes(directory: str, out: str, in_background: bool) -> list[set[str]]:
    saver, look = ModelCheckpoint(out, "{step}", every_n_train_steps=1, save_top_k=1), _Look(out)
    trainer = _trainer(callbacks=(saver, look), strategy={"async_save": in_background})
    module = Module(directory)
    trainer.fit(module)
    trainer.strategy.barrier()
    assert [path.name for path in Path(out).iterdir()] == ["step=12.ckpt"], "the last is complete when fit returns"
    fresh = Module(directory)
    _trainer().validate(fresh, ckpt_path=f"{out}/step=12.ckpt", verbose=False)
    assert same(factors(fresh.model), factors(module.model))
    trainer.save_checkpoint(f"{out}/after.ckpt")
    assert Path(out, "after.ckpt", "manifest.json").exists()
    return look.found


@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.full), True])
def test_old_checkpoints_go(workers: WorkerPool, tiny_llama: Path, tmp_path: Path, in_background: bool) -> None:
    found, _ = workers(2, _removes, str(tiny_llama), str(tmp_path / "checkpoints"), in_background)
    first = next(i for i, names in enumerate(found) if names)
    assert all(found[first:]), "there is never none, once there was one"


# -- strict --------------------------------------------------------------------------------------------------------


def _strict(directory: str, out: str) -> None:
    module = Module(directory)
    trainer = _trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(module)
    trained = factors(module.model)
    trainer.save_checkpoint(out)
    for targets, message in (
        (("linear_qkv",), r"unexpected there: \['model.decoder.layers.0.mlp.linear_fc1.lora.a'"),
        ((*tiny.SITES, "output_layer"), r"Missing in the checkpoint: \['model.output_layer.lora.a'"),
    ):
        lora = LoRASPCallback(rank=tiny.RANK, alpha=tiny.ALPHA, target_modules=targets, verbose=False)
        options = {"mode": None, "enable_checkpointing": False, "callbacks": (lora,)}
        with pytest.raises(RuntimeError, match=message):
            _trainer(**options).validate(Module(directory), ckpt_path=out, verbose=False)
        lenient = Module(directory)
        lenient.strict_loading = False
        _trainer(**options).validate(lenient, ckpt_path=out, verbose=False)
        found = factors(lenient.model)
        assert all(torch.equal(found[key], value) for key, value in trained.items() if key in found)


@pytest.mark.full
def test_adapter_keys_are_strict(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    workers(2, _strict, str(tiny_llama), str(tmp_path / "adapter.ckpt"))


# -- alone ---------------------------------------------------------------------------------------------------------


def _save_with_trainer(directory: str, out: str, mode: str = "local") -> dict[Any, torch.Tensor]:
    module = Module(directory)
    _trainer(max_epochs=1, mode=mode, callbacks=(ModelCheckpoint(out, "adapter", save_weights_only=True),)).fit(module)
    return factors(module.model)


def _alone(directory: str, path: str) -> dict[Any, torch.Tensor]:
    from lightning_mcore_lora import cpu_backend

    cpu_backend.apply()
    world = torch.distributed.get_world_size()
    with pytest.raises(RuntimeError, match="there are no parallel groups"):
        load_checkpoint(torch.nn.Linear(1, 1), path)
    parallel = ParallelContext.create(ParallelSizes(world, world, world > 1))
    model = build_gpt_model(directory, parallel)
    load_hf_weights(model, directory, parallel)
    manifest = load_checkpoint(model, path)
    assert manifest.lora is not None
    assert manifest.lora["alpha"] == tiny.ALPHA

    other = build_gpt_model(directory, parallel)
    apply_lora(other, LoRAConfig(rank=6, alpha=tiny.ALPHA))
    with pytest.raises(RuntimeError, match="rank=6 in LoRAConfig, saved with 12"):
        load_checkpoint(other, path)
    smaller = build_gpt_model(directory, parallel, num_layers=1)
    with pytest.raises(RuntimeError, match=r"the base model is .*: their configs differ; .*unexpected there: \['"):
        load_checkpoint(smaller, path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_checkpoint(build_gpt_model(directory, parallel), path)
    heard = [str(warning.message) for warning in said if warning.category is not DeprecationWarning]
    assert any("had other weights when this was saved" in text for text in heard) == (parallel.global_rank == 0)
    assert not any("load_state_dict" in text for text in heard)
    return factors(model)


def test_alone(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    workers(2, _save_with_trainer, str(tiny_llama), str(tmp_path), "regather")
    workers(1, _alone, str(tiny_llama), str(tmp_path / "adapter.ckpt"))
    saved = workers(2, _save_with_trainer, str(tiny_llama), str(tmp_path / "local"))
    loaded = workers(2, _alone, str(tiny_llama), str(tmp_path / "local" / "adapter.ckpt"))
    assert all(same(one, other) for one, other in zip(saved, loaded, strict=True))


@pytest.mark.full
def test_documented_alone(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    """The script of docs/checkpoints.md, with another model."""
    workers(2, _save_with_trainer, str(tiny_llama), str(tmp_path))
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    script = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "load_checkpoint(" in code)
    for there, here in {
        ".cache/smollm2-135m-instruct": tiny_llama,
        "runs/finetune/last.ckpt": tmp_path / "adapter.ckpt",
        "29511": free_port(),
    }.items():
        assert there in script
        script = script.replace(there, str(here))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{tiny_llama.name} 4 {{'rank': 12," in done.stdout


def _fabric_reads(directory: str, path: str) -> dict[Any, torch.Tensor]:
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2))
    model = runs.model_for_fabric(fabric, directory, "local")
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match=r"was not written by Fabric: its weights can be read by fabric.load_raw"):
        fabric.load(path, {"model": model, "optimizer": optimizer})
    fabric.load_raw(path, model)
    fabric.save(f"{path}.fabric", {"model": model, "optimizer": optimizer})
    return factors(model)


def _trainer_reads(directory: str, path: str) -> None:
    with pytest.raises(RuntimeError, match="was not written by a Trainer: its weights can be read by load_checkpoint"):
        _trainer().fit(Module(directory), ckpt_path=f"{path}.fabric")


@pytest.mark.full
def test_what_one_framework_wrote_the_other_reads(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    saved = workers(2, _save_with_trainer, str(tiny_llama), str(tmp_path))
    path = str(tmp_path / "adapter.ckpt")
    loaded = workers(2, _fabric_reads, str(tiny_llama), path)
    assert all(same(one, other) for one, other in zip(saved, loaded, strict=True))
    workers(2, _trainer_reads, str(tiny_llama), path)
    loaded = workers(2, _alone, str(tiny_llama), f"{path}.fabric")
    assert all(same(one, other) for one, other in zip(saved, loaded, strict=True))


def _frozen_and_loops(directory: str, out: str) -> None:
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2), precision="bf16-true")
    model = runs.model_for_fabric(fabric, directory, "local")
    model.decoder.final_layernorm.requires_grad_()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Stream(), batch_size=2))
    assert len(list(loader)) == 10
    fabric.save(out, {"model": model, "optimizer": optimizer, "loader": loader})
    expected = factors(model)
    norm = model.decoder.final_layernorm.weight
    saved = norm.detach().clone()
    with torch.no_grad():
        for p in (*runs.factors_of(model).values(), norm, norm.float32_master):
            p.zero_()
    fabric.load(out, {"model": model, "loader": loader})
    assert len(list(loader)) == 10, "an epoch that had ended is over"
    with torch.no_grad():
        norm.zero_()
        norm.float32_master.zero_()
    load_checkpoint(model, out)
    fabric.strategy.engine.masters.copy_back()
    assert torch.equal(norm, saved), "its master was set too"

    other = runs.model_for_fabric(fabric, directory, "local")
    with torch.no_grad():
        for p in runs.factors_of(other).values():
            p.zero_()
    other.requires_grad_(False)
    fabric.load(out, {"model": other}, strict=False)
    assert same(factors(other), expected), "adapters to look at"


def test_fabric_loads_what_is_there(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    workers(2, _frozen_and_loops, str(tiny_llama), str(tmp_path / "state.ckpt"))


def _link(directory: str, out: str) -> None:
    saver = ModelCheckpoint(out, save_last="link")
    with pytest.raises(NotImplementedError, match=r"ModelCheckpoint\(save_last='link'\) does not fit async_save=True"):
        _trainer(callbacks=(saver,), strategy={"async_save": True}).fit(Module(directory))


def test_no_link_to_what_is_not_there_yet(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    workers(2, _link, str(tiny_llama), str(tmp_path))


# -- optimizers ----------------------------------------------------------------------------------------------------


class Factored(Module):
    """Its optimizer keeps sums of rows and columns, of which nobody knows how they are sharded."""

    optimizer: Any = torch.optim.Adafactor

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-2)


class Plain(Factored):
    """Another optimizer."""

    optimizer = torch.optim.SGD


def _fit(kind: Any, directory: str, tp: int, steps: int, out: str | None, ckpt: str | None) -> Any:
    module = kind(directory)
    trainer = _trainer(tp, max_epochs=-1, max_steps=steps, enable_checkpointing=False)
    trainer.fit(module, ckpt_path=ckpt)
    if out is not None:
        trainer.save_checkpoint(out)
    return factors(module.model)


@pytest.mark.full
def test_states_that_cannot_be_split_go_on_at_the_same_layout(
    workers: WorkerPool, tiny_llama: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "adapter.ckpt")
    straight = workers(2, _fit, Factored, str(tiny_llama), 2, 4, None, None)
    workers(2, _fit, Factored, str(tiny_llama), 2, 2, out, None)
    rest = workers(2, _fit, Factored, str(tiny_llama), 2, 4, None, out)
    assert all(same(one, other) for one, other in zip(straight, rest, strict=True))
    with pytest.raises(WorkerError, match=r"Adafactor keeps \['col_var', 'row_var'.*Resume at the same layout"):
        workers(2, _fit, Factored, str(tiny_llama), 1, 4, None, out)
    with pytest.raises(WorkerError, match="its optimizer is Adafactor, this run's is SGD"):
        workers(2, _fit, Plain, str(tiny_llama), 2, 4, None, out)
