"""MCoreTP under Fabric: the Trainer's numbers, and every method of Fabric's right or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_mcore_lora import LoRASPCallback, MCoreTP, build_gpt_model
from tests import runs, tiny
from tests.integration.test_parity import GRADIENT_BOUND, LAYOUTS, LOSS_BOUND, MODES, compare
from tests.oracle import Oracle, Run
from tests.workers import WorkerError, WorkerPool

#: (TP, SP, DP, mode) of the quick run; the full one has the Trainer's whole matrix.
QUICK = {(1, False, 2, "local"), (2, True, 2, "local")}
CASES = [
    pytest.param(*layout, mode, marks=() if (*layout, mode) in QUICK else pytest.mark.full)
    for layout in LAYOUTS
    for mode in MODES
]


@pytest.mark.parametrize(("tp", "sp", "dp", "mode"), CASES)
def test_equals_oracle_and_trainer(
    workers: WorkerPool, tiny_llama: Path, oracle_run: Run, tp: int, sp: bool, dp: int, mode: str
) -> None:
    # Adapters come before set-up or in it.
    ranks = workers(tp * dp, runs.train_fabric, str(tiny_llama), tp, sp, mode, in_setup=mode == "regather")
    errors = compare(ranks, oracle_run, sp)
    assert errors["gradient"] < GRADIENT_BOUND, errors
    assert errors["input"] < GRADIENT_BOUND, errors
    assert errors["norm"] < LOSS_BOUND, errors
    assert errors["weight"] < LOSS_BOUND, errors
    for one, other in zip(ranks, workers(tp * dp, runs.train, str(tiny_llama), tp, sp, mode), strict=True):
        assert one["losses"] == other["losses"], "the Trainer's to the bit"
        assert all(torch.equal(one["factors"][key], other["factors"][key]) for key in one["factors"])


@pytest.mark.full
def test_every_token_weighs_the_same(workers: WorkerPool, tiny_llama: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(tiny.STEPS * tiny.SAMPLES_PER_STEP, tiny.SEQUENCE, generator=generator)
    mask = (mask < torch.linspace(0.1, 0.9, len(mask))[:, None]).float()
    expected = Oracle(tiny_llama).train(runs.CLIP, mask.double())
    ranks = workers(4, runs.train_fabric, str(tiny_llama), 2, True, "local", mask)
    errors = compare(ranks, expected, True)
    assert errors["gradient"] < GRADIENT_BOUND, errors
    assert errors["weight"] < LOSS_BOUND, errors


# -- steps -----------------------------------------------------------------------------------------------------


def _set_up(directory: str, **kwargs: Any) -> tuple[Any, Any, Any]:
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2), **kwargs)
    model = runs.model_for_fabric(fabric, directory, "local")
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return fabric, model, optimizer


def _gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in runs.factors_of(model).values()])


def _steps(directory: str) -> None:
    fabric, model, optimizer = _set_up(directory)
    samples = tiny.tokens()

    def backward(part: slice) -> None:
        fabric.backward(runs.token_losses(model, samples[part]).mean())

    backward(slice(0, 2))
    norm = fabric.clip_gradients(model, optimizer, max_norm=1e30)
    once = _gradients(model)
    # A step that is not taken leaves nothing behind, wherever it is given up.
    optimizer.zero_grad()
    backward(slice(2, 4))
    optimizer.zero_grad()
    backward(slice(0, 2))
    assert fabric.clip_gradients(model, optimizer, max_norm=1e30) == norm
    assert torch.equal(_gradients(model), once)
    optimizer.zero_grad()
    backward(slice(2, 4))
    model.zero_grad()
    backward(slice(0, 2))
    model.zero_grad(set_to_none=False)
    backward(slice(0, 2))
    fabric.clip_gradients(model, optimizer, max_norm=1e30)
    assert torch.equal(_gradients(model), once)
    # By value; by other norms.
    fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    assert _gradients(model).abs().max() == torch.tensor(1e-3)
    largest = fabric.clip_gradients(model, optimizer, max_norm=1e30, norm_type=float("inf"))
    assert largest == torch.tensor(1e-3)
    with pytest.raises(
        RuntimeError, match=r"backward after the gradients were reduced .* clip once per optimizer step"
    ):
        backward(slice(0, 2))
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"num_tokens is torch.bfloat16, which does not hold every count"):
        fabric.backward(torch.ones((), requires_grad=True), num_tokens=torch.ones((), dtype=torch.bfloat16))
    # A closure.
    before = [p.detach().clone() for p in runs.factors_of(model).values()]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = runs.token_losses(model, samples[0:2]).mean()
        fabric.backward(loss)
        return loss

    assert optimizer.step(closure).item() > 0
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, runs.factors_of(model).values(), strict=True)])
    assert torch.allclose(moved, once, atol=1e-6)
    # Not finite, on all ranks alike.
    fabric.backward(runs.token_losses(model, samples[0:2]).mean() * float("nan"))
    with pytest.raises(RuntimeError, match="the global gradient norm is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_steps_and_clipping(workers: WorkerPool, tiny_llama: Path) -> None:
    workers(2, _steps, str(tiny_llama))


def _norms(directory: str, tp: int) -> list[float]:
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=tp))
    model = runs.model_for_fabric(fabric, directory, "local")
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(runs.token_losses(model, tiny.tokens()[:2]).mean())
    return [fabric.clip_gradients(model, optimizer, max_norm=1e30, norm_type=p).item() for p in (1, 2, 3, float("inf"))]


def test_every_norm_is_global(workers: WorkerPool, tiny_llama: Path) -> None:
    expected = workers(1, _norms, str(tiny_llama), 1)[0]
    for norms in workers(2, _norms, str(tiny_llama), 2):
        assert norms == pytest.approx(expected, rel=1e-5)


def _models(directory: str) -> None:
    fabric, model, _ = _set_up(directory)
    other = build_gpt_model(directory, fabric.strategy.parallel).requires_grad_(False)
    other = fabric.setup(other)  # a frozen one beside it, as preference tuning has
    assert torch.isfinite(runs.token_losses(other, tiny.tokens()[:2])).all()
    fabric.backward(runs.token_losses(model, tiny.tokens()[:2]).mean())
    second = runs.model_for_fabric(fabric, directory, "local")
    with pytest.raises(
        NotImplementedError, match=r"GPTModel is the second with trainable parameters: hold both in one"
    ):
        fabric.setup(second, torch.optim.SGD(second.parameters(), lr=1.0))


def test_second_model(workers: WorkerPool, tiny_llama: Path) -> None:
    workers(2, _models, str(tiny_llama))


def _refuse(directory: str, case: str) -> None:
    callbacks = [LoRASPCallback()] if case == "callback" else []
    fabric = runs.fabric(MCoreTP(), precision="64-true" if case == "precision" else "32-true", callbacks=callbacks)
    model = runs.model_for_fabric(fabric, directory, "local", in_setup=case == "optimizer made before")
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2 if case == "two optimizers" else 1)]
    if case == "optimizer first":
        fabric.setup_optimizers(*optimizers)
    if case == "LBFGS":
        optimizers = [torch.optim.LBFGS(model.parameters())]
    if case == "distributed optimizer":
        optimizers = [object.__new__(DistributedOptimizer)]  # type: ignore[list-item]
        optimizers[0].__dict__["optimizer"] = torch.optim.SGD(model.parameters(), lr=1.0)
    if case == "backward":
        fabric.backward(torch.ones((), requires_grad=True))
    fabric.setup(model, *optimizers)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("precision", "precision='64-true' is not supported by MCoreTP: use one of"),
        ("two optimizers", "fabric.setup got 2 optimizers"),
        ("optimizer first", r"set up the model before its optimizer: fabric.setup\(model, optimizer\)"),
        ("optimizer made before", r"SGD holds no trainable parameter: .* in Fabric after apply_lora"),
        ("LBFGS", "LBFGS is not supported by MCoreTP"),
        ("distributed optimizer", r"DistributedOptimizer is not supported by MCoreTP: .* \(its distributed form too\)"),
        ("callback", r"LoRASPCallback is for the Trainer: with Fabric call apply_lora"),
        ("backward", r"backward before fabric.setup\(model, optimizer\)"),
    ],
)
def test_refused_with_the_fix(workers: WorkerPool, tiny_llama: Path, case: str, match: str) -> None:
    with pytest.raises(WorkerError, match=match):
        workers(1, _refuse, str(tiny_llama), case)


def _collectives() -> dict[str, Any]:
    strategy = MCoreTP(tensor_parallel_size=2)
    fabric = runs.fabric(strategy)
    rank = torch.tensor(float(fabric.global_rank))
    return {
        "dp": strategy.parallel.dp_rank,
        "mean": fabric.all_reduce(rank).item(),
        "sum": fabric.all_reduce(rank, reduce_op="sum").item(),
        "gathered": fabric.all_gather(rank).tolist(),
        "broadcast": fabric.broadcast(fabric.global_rank, src=2),
        "samples": [i for batch in fabric.setup_dataloaders(_indices()) for i in batch[0].tolist()],
    }


def _indices() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)


def test_collectives_are_data_parallel(workers: WorkerPool) -> None:
    ranks = workers(4, _collectives)
    assert [rank["mean"] for rank in ranks] == [1.0, 2.0, 1.0, 2.0]
    assert [rank["sum"] for rank in ranks] == [2.0, 4.0, 2.0, 4.0]
    assert [rank["gathered"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {rank["broadcast"] for rank in ranks} == {2}
    assert ranks[0]["samples"] == ranks[1]["samples"]
    assert sorted(ranks[0]["samples"] + ranks[2]["samples"]) == list(range(8))


# -- checkpoints -----------------------------------------------------------------------------------------------


def _run(directory: str, out: str, stop_at: int | None, resume: bool, precision: str) -> dict[str, Any]:
    """Two epochs with shuffled data and dropout."""
    fabric = runs.fabric(MCoreTP(tensor_parallel_size=2), precision=precision)
    with fabric.init_module():
        model = build_gpt_model(directory, fabric.strategy.parallel, hidden_dropout=0.1, attention_dropout=0.1)
        runs.load_hf_weights(model, directory, fabric.strategy.parallel)
    runs.apply_lora(model, runs.LoRAConfig(rank=4))
    model.decoder.final_layernorm.requires_grad_()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(tiny.tokens()[:8], batch_size=2, shuffle=True))
    assert len(loader.dataset) == 8
    teacher = torch.nn.Linear(1, 1).requires_grad_(False)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "teacher": teacher}
    state |= {"step": 0, "note": {"keep": 1, "drop": 2}}
    if resume:
        assert fabric.load(out, state) == {}
        assert state["note"] == {"keep": 1}
    order = []
    while state["step"] < 8:
        for samples in loader:
            order.append(samples[:, 0].tolist())
            fabric.backward(runs.token_losses(model, samples).mean())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            if state["step"] == stop_at:
                fabric.save(out, state, filter={"note": lambda name, value: name == "keep"})
                return {}
    trained = fabric.strategy.engine.tensors(model).trained
    moments = optimizer.state_dict()["state"]
    return {
        "order": order,
        "weights": {name: p.detach().clone() for name, p in trained.items()},
        "moments": {i: {k: v.clone() for k, v in entry.items()} for i, entry in moments.items()},
    }


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.full)])
@pytest.mark.parametrize("stop_at", [2, pytest.param(6, marks=pytest.mark.full)])
def test_continues_bitwise(workers: WorkerPool, tiny_llama: Path, tmp_path: Path, stop_at: int, precision: str) -> None:
    out = str(tmp_path / "state.ckpt")
    straight = workers(2, _run, str(tiny_llama), out, None, False, precision)
    workers(2, _run, str(tiny_llama), out, stop_at, False, precision)
    resumed = workers(2, _run, str(tiny_llama), out, None, True, precision)
    for one, other in zip(straight, resumed, strict=True):
        assert other["order"] == one["order"][stop_at:]
        assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
        for i, entry in one["moments"].items():
            assert all(torch.equal(value, other["moments"][i][key]) for key, value in entry.items())


def _filtered(directory: str, out: str) -> None:
    fabric, model, optimizer = _set_up(directory)
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    with pytest.raises(NotImplementedError, match="an optimizer is saved whole or not at all"):
        fabric.save(out, state, filter={"optimizer": lambda name, value: True})
    fabric.save(out, state, filter={"model": lambda name, p: name.endswith(".a")})
    factors = runs.factors_of(model)
    kept = {key: p.detach().clone() for key, p in factors.items()}
    with torch.no_grad():
        for p in factors.values():
            p.zero_()
    with pytest.raises(
        RuntimeError, match=r"parameters are not those of this run. Missing in the checkpoint: \[.*lora.b'"
    ):
        fabric.load(out, {"model": model, "epoch": 0})
    with pytest.raises(KeyError, match="contains a key 'other'"):
        fabric.load(out, {"epoch": 0, "other": 0})
    target = {"model": model, "epoch": 0}
    rest = fabric.load(out, target, strict=False)
    assert (target["epoch"], rest) == (3, {})
    for key, p in factors.items():
        assert torch.equal(p, kept[key] if key[1] == "a" else torch.zeros_like(p))
    with pytest.raises(ValueError, match=r"the state holds \['optimizer'\] without the model"):
        fabric.save(out, {"optimizer": optimizer})
    with pytest.raises(ValueError, match="loads shards into what is there"):
        fabric.load(out)
    fabric.load_raw(out, model, strict=False)


def test_filter_and_strict(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    workers(2, _filtered, str(tiny_llama), str(tmp_path / "state.ckpt"))


def _microbatches(directory: str) -> list[int]:
    strategy = MCoreTP()
    f = runs.fabric(strategy)
    model = runs.model_for_fabric(f, directory, "local", False)
    model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[int] = []
    before = strategy.engine.reducer.before_backward
    strategy.engine.reducer.before_backward = lambda loss, tokens, accumulate, scale: (
        seen.append(accumulate) or before(loss, tokens, accumulate, scale)
    )
    f.backward(runs.token_losses(model, tiny.tokens()[:2]).mean() / 2, microbatches=2)
    optimizer.zero_grad()
    f.backward(runs.token_losses(model, tiny.tokens()[:2]).sum(), num_tokens=2 * tiny.SEQUENCE)
    return seen


def test_auxiliary_losses_are_divided_as_the_loss_is(workers: WorkerPool, tiny_llama: Path) -> None:
    assert workers(1, _microbatches, str(tiny_llama))[0] == [2, 1]
