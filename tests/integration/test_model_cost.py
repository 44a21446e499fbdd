"""A whole model with adapters: bytes as the report predicts them, gradients with recomputed inputs as without."""

from typing import Any

import pytest
import torch

from lightning_mcore_lora import LoRAConfig, apply_lora
from lightning_mcore_lora.adapters import adapters
from tests.mcore_runs import fill_by_name, moe_or_dense_model
from tests.workers import WorkerPool

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
    from lightning_mcore_lora import cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, sequence, 1, tp))
    seeding.seed_for_init()
    model = moe_or_dense_model(parallel, **config)
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
}


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True), (3, True)])
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


@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "none"])
def test_predicted_bytes_with_recompute(workers: WorkerPool, recompute: str) -> None:
    loras = {name: LORAS[name] for name in (*MODES, "recompute_inputs")}
    for rank in workers(2, _compared, 2, True, loras, RECOMPUTE[recompute]):
        floor = rank.pop("floor")
        for name, counted in rank.items():
            assert counted["kept"] - floor["kept"] == counted["predicted kept"], name


def _gradients(lora: dict[str, Any], config: dict[str, Any], embedding_hook: bool) -> dict[str, torch.Tensor]:
    model, _, _ = _build(2, True, lora, config)
    if not embedding_hook:
        model.embedding._forward_hooks.popitem()  # of the tests; the package's own is left
    from lightning_mcore_lora.strategy import seeding

    seeding.seed_for_init()
    _loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


# Where the base recomputes, re-gather runs as gather, whose masks are others: it is left out with dropout.
@pytest.mark.parametrize(
    ("mode", "dropout"), [("gather", 0.0), ("regather", 0.0), ("local", 0.0), ("gather", 0.3), ("local", 0.3)]
)
@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "none"])
def test_recompute_reaches_adapters_over_a_frozen_embedding(
    workers: WorkerPool, recompute: str, mode: str, dropout: float
) -> None:
    lora = {"sequence_mode": mode, "dropout": dropout}
    plain = workers(2, _gradients, lora, {}, True)
    again = workers(2, _gradients, lora, RECOMPUTE[recompute], False)
    for one, other in zip(plain, again, strict=True):
        for name, gradient in one.items():
            assert other[name] is not None, f"{name} got no gradient"
            if recompute == "layernorm":
                torch.testing.assert_close(gradient, other[name], rtol=0, atol=1e-6 * gradient.abs().max().item())
            else:
                assert torch.equal(gradient, other[name]), name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("config", [{}, {"gated_linear_unit": False}, {"normalization": "LayerNorm"}], ids=str)
def test_recomputed_inputs_are_the_same(workers: WorkerPool, config: dict[str, Any], dropout: float) -> None:
    plain = workers(2, _gradients, {"dropout": dropout}, config, True)
    again = workers(2, _gradients, {"dropout": dropout, "recompute_inputs": True}, config, True)
    for one, other in zip(plain, again, strict=True):
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
