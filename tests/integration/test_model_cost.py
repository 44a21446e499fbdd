"""A whole model with adapters: bytes as the report predicts them, gradients with recomputed inputs as without."""

import functools
from typing import Any

import pytest
import torch

from lightning_mcore_lora import LoRAConfig, apply_lora
from lightning_mcore_lora.adapters import adapters
from tests.mcore_runs import fill_by_name, model_at
from tests.workers import WorkerError, WorkerPool

MODES = ("gather", "regather", "local")
SEQUENCE, BATCH = 6, 2  # TP 2 and 3 divide the sequence
SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "full block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "mlp": SELECTIVE | {"recompute_modules": ["mlp"]},
    "core_attn": SELECTIVE | {"recompute_modules": ["core_attn"]},
    "layernorm": SELECTIVE | {"recompute_modules": ["layernorm"]},
}


def _build(tp: int, sequence: bool, lora: dict[str, Any] | None, config: dict[str, Any]) -> tuple[Any, Any, Any]:
    model, parallel = model_at(tp, sequence, **config)
    fill_by_name(model, parallel)
    model.requires_grad_(False)
    report = None
    if lora is not None:
        report = apply_lora(model, LoRAConfig(rank=6, **lora))
        generator = torch.Generator().manual_seed(9)
        for _, adapter in adapters(model):
            site, width = adapter.site, adapter.plan.width
            a, b = (torch.randn(shape, generator=generator) for shape in ((width, site.d_in), (site.d_out, 6)))
            adapter.load_full(a, b)
    model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return model, report, parallel


def _loss(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 64, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(SEQUENCE)[None].expand_as(ids)
    return model(ids, positions, None, labels=ids.roll(-1, 1)).mean()


def _counted(tp: int, sequence: bool, lora: dict[str, Any] | None, config: dict[str, Any]) -> dict[str, int]:
    """Bytes kept by a forward and sent in a step, and the report's of both."""
    from benchmarks.counting import Collectives, kept_for_backward
    from lightning_mcore_lora.strategy.gradients import GradientReducer
    from lightning_mcore_lora.strategy.precision import Masters

    model, report, parallel = _build(tp, sequence, lora, config)
    reducer = GradientReducer(model, parallel, Masters()) if lora is not None else None
    _loss(model).backward()  # caches are filled
    if reducer is not None:
        reducer.finalize()
        reducer.clear()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    with Collectives() as collectives, kept_for_backward(own) as kept:
        loss = _loss(model)
        found = {"kept": kept()}
        if reducer is not None:
            loss = reducer.before_backward(loss, None)
        loss.backward()
        if reducer is not None:
            reducer.after_backward()
            reducer.finalize()
            reducer.close()
    found |= {"sent": collectives.sent(), "collectives": len(collectives.seen)}
    if report is not None:
        tokens = BATCH * SEQUENCE
        found |= {"predicted kept": report.cost.kept(tokens), "predicted sent": report.cost.sent(tokens)}
    return found


def _compared(tp: int, sequence: bool, loras: dict[str, dict], config: dict[str, Any]) -> dict[str, Any]:
    floor = _counted(tp, sequence, None, config)
    return {"floor": floor} | {name: _counted(tp, sequence, lora, config) for name, lora in loras.items()}


LORAS: dict[str, dict[str, Any]] = {
    **{mode: {"sequence_mode": mode} for mode in MODES},
    "recompute_inputs": {"recompute_inputs": True},
    "recompute_inputs, dropout": {"recompute_inputs": True, "dropout": 0.1},
    "dora": {"dora": True, "canonical": True},
    "A frozen": {"freeze_a": True},
    "output layer": {"target_modules": ["linear_qkv", "output_layer"]},
    "regather, dropout": {"sequence_mode": "regather", "dropout": 0.1},
}


LAYOUTS = [(1, False), (2, False), (2, True), (3, True)]


@pytest.mark.parametrize(
    ("tp", "sequence"),
    [pytest.param(n, sp, marks=() if (n, sp) == (2, True) else pytest.mark.full) for n, sp in LAYOUTS],
)
def test_predicted_bytes_equal_the_counted(workers: WorkerPool, tp: int, sequence: bool) -> None:
    shape = {"num_attention_heads": 6, "vocab_size": 66} if tp == 3 else {}
    for rank in workers(tp, _compared, tp, sequence, LORAS, shape):
        floor = rank.pop("floor")
        for name, counted in rank.items():
            assert counted["kept"] - floor["kept"] == counted["predicted kept"], name
            assert counted["sent"] - floor["sent"] == counted["predicted sent"], name
        if tp > 1 and sequence:  # 8 a layer, and one for all weights together
            assert rank["local"]["collectives"] == floor["collectives"] + 8 * 2 + 1
        assert rank["recompute_inputs"]["kept"] < rank["local"]["kept"]


QUICK = ("full block", "layernorm")


@pytest.mark.parametrize(
    "config",
    [*(pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in RECOMPUTE if n != "none"), "bfloat16"],
)
def test_predicted_bytes_of(workers: WorkerPool, config: str) -> None:
    loras = {name: LORAS[name] for name in (*MODES, "recompute_inputs", "regather, dropout", "dora")}
    half = {"params_dtype": torch.bfloat16, "bf16": True}
    if config == "bfloat16":  # torch's RMSNorm on the CPU keeps a float32 copy of its input, and not the input
        del loras["recompute_inputs"]
    for rank in workers(2, _compared, 2, True, loras, RECOMPUTE.get(config, half)):
        floor = rank.pop("floor")
        for name, counted in rank.items():
            assert counted["kept"] - floor["kept"] == counted["predicted kept"], name
            assert counted["sent"] - floor["sent"] == counted["predicted sent"], name


def _gradients(
    lora: dict[str, Any], config: dict[str, Any], embedding_hook: bool = True, checkpoint: bool = False
) -> dict[str, torch.Tensor]:
    from lightning_mcore_lora.strategy import seeding

    model, _, _ = _build(2, True, lora, config)
    if not embedding_hook:
        model.embedding._forward_hooks.popitem()  # of the tests; the package's own is left
    if checkpoint:
        for layer in model.decoder.layers:
            layer.forward = functools.partial(_checkpointed, layer.forward)
    seeding.seed_for_init()
    _loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def _checkpointed(forward: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda x: forward(x, **kwargs), hidden_states, use_reentrant=True)


def _differences(config: dict[str, Any], cases: list[dict[str, Any]], **how: Any) -> dict[str, float]:
    """The largest relative difference of any gradient in each case from the same without recompute."""
    found = {}
    for lora in cases:
        plain, again = _gradients(lora, {}), _gradients(lora, config, **how)
        assert all(gradient is not None for gradient in again.values())
        errors = [(again[name] - value).abs().max() / value.abs().max() for name, value in plain.items()]
        found[str(lora)] = max(errors).item()
    return found


# Where Megatron-Core recomputes the site, re-gather runs as gather, whose masks are others: left out with dropout.
WITH_DROPOUT = [{"sequence_mode": mode, "dropout": 0.3} for mode in ("gather", "local")]


@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "none"])
def test_recompute_reaches_adapters_over_a_frozen_embedding(workers: WorkerPool, recompute: str) -> None:
    cases = [*({"sequence_mode": mode} for mode in MODES), *WITH_DROPOUT]
    bound = 1e-6 if recompute == "layernorm" else 0.0
    for rank in workers(2, _differences, RECOMPUTE[recompute], cases, embedding_hook=False):
        assert not {case: error for case, error in rank.items() if error > bound}


def test_torch_checkpoints_draw_the_same_masks(workers: WorkerPool) -> None:
    cases = [*WITH_DROPOUT, {"sequence_mode": "regather", "dropout": 0.3}, {"sequence_mode": "regather"}]
    for rank in workers(2, _differences, {}, cases, checkpoint=True):
        assert not {case: error for case, error in rank.items() if error}


def _recomputed(configs: list[dict[str, Any]]) -> list[bool]:
    equal = []
    for config in configs:
        for dropout in (0.0, 0.3):
            plain = _gradients({"dropout": dropout}, config)
            again = _gradients({"dropout": dropout, "recompute_inputs": True}, config)
            equal.append(all(torch.equal(gradient, again[name]) for name, gradient in plain.items()))
    return equal


def test_recomputed_inputs_are_the_same(workers: WorkerPool) -> None:
    configs = [{}, {"gated_linear_unit": False}, {"normalization": "LayerNorm"}]
    for rank in workers(2, _recomputed, configs):
        assert all(rank), rank


def _changed_activation() -> None:
    model, _, _ = _build(2, True, {"recompute_inputs": True}, {})
    model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(lambda m, args, out: (out[0] * 2, out[1]))
    _loss(model)


def test_an_input_that_does_not_come_again_is_an_error(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="the output of ColumnParallelLinear does not give the adapter's input again"):
        workers(2, _changed_activation)
