"""Adapters of experts: what is chosen, refused, begun with, and reported."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mcore_lora import LoRAConfig, apply_lora, merge_lora, remove_lora, unmerge_lora
from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.adapters.config import DEFAULT_TARGETS
from tests import expert_runs, moe_runs
from tests.mcore_runs import moe_or_dense_model
from tests.workers import WorkerError, WorkerPool

MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 24}
EXPERTS = ("experts.linear_fc1", "experts.linear_fc2")


def model_at(layout: tuple[int, int, int], **config: Any) -> Any:
    """A mixture of experts at TP, EP, ETP."""
    from lightning_mcore_lora import cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    tp, ep, etp = layout
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, tp > 1, ep, etp))
    seeding.seed_for_init()
    return moe_or_dense_model(parallel, **(MOE | config)), parallel


def test_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_adapters='all' must be one of \('per_expert', 'shared', 'shared_o"):
        LoRAConfig(expert_adapters="all")


def _report(lora: dict[str, Any], **config: Any) -> Any:
    model, _ = model_at((1, 1, 1), **config)
    report = apply_lora(model, LoRAConfig(**{"rank": 8, "alpha": 4.0, **lora}))
    plans = {a.site.name: (a.plan.rank, a.plan.scale) for _, a in adapters(model)}
    return report, plans, {name for name, p in model.named_parameters() if p.requires_grad}


def test_experts_are_targets_like_any_other(workers: WorkerPool) -> None:
    report, _, trained = workers(1, _report, {})[0]
    assert [site for site in report.sites if site.mode is None] == []
    assert not any("router" in name for name in trained), "the router is frozen unless it is named"
    per_layer = 8 * (4 * ((24 + 96) + (48 + 24)) + ((24 + 48) + (24 + 24)) + ((24 + 72) + (24 + 24)))
    assert report.trainable_parameters == 2 * per_layer
    assert "experts: as if each got as many tokens as any other" in str(report)
    assert "column, collectives removed: A replicated, B sharded on d_out" in str(report)
    _, _, trained = workers(1, _report, {"target_modules": ["router"]})[0]
    assert {name.rpartition(".")[2] for name in trained} == {"a", "b"}


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("per_expert", {(4, 8, 24), (4, 96, 8), (4, 8, 48), (4, 24, 8)}),
        ("shared", {(8, 24), (96, 8), (8, 48), (24, 8)}),
        ("shared_outer", {(8, 24), (4, 96, 8), (4, 8, 48), (24, 8)}),
    ],
)
def test_shapes(workers: WorkerPool, layout: str, shapes: set[tuple[int, ...]]) -> None:
    assert workers(1, _shapes, layout)[0] == shapes


def _shapes(layout: str) -> set[tuple[int, ...]]:
    model, _ = model_at((1, 1, 1))
    apply_lora(model, LoRAConfig(rank=8, target_modules=EXPERTS, expert_adapters=layout))
    return {tuple(p.shape) for p in model.parameters() if p.requires_grad}


def test_rank_is_divided_by_the_experts_of_a_token(workers: WorkerPool) -> None:
    lora = {"normalize_expert_rank": True, "rank_pattern": {"*.layers.1.*.experts.linear_fc2": 6}}
    plans = workers(1, _report, lora)[0][1]
    given = {"rank": 7, "normalize_expert_rank": True, "rank_pattern": {"experts.*": 3}}
    assert workers(1, _report, given)[0][1]["decoder.layers.0.mlp.experts.linear_fc1"] == (3, 4.0 / 3)
    assert plans["decoder.layers.0.mlp.experts.linear_fc1"] == (4, 1.0)
    assert plans["decoder.layers.1.mlp.experts.linear_fc2"] == (6, 4.0 / 6)
    assert plans["decoder.layers.0.mlp.shared_experts.linear_fc1"] == (8, 0.5)
    with pytest.raises(WorkerError, match=r"rank=7 is not divisible by moe_router_topk=2 at .*experts.linear_fc1"):
        workers(1, _report, {"rank": 7, "normalize_expert_rank": True})


def _initial(layout: tuple[int, int, int], expert_adapters: str) -> dict[str, Any]:
    model, parallel = model_at(layout)
    apply_lora(model, LoRAConfig(rank=8, target_modules=EXPERTS, expert_adapters=expert_adapters))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    marks = moe_runs.places({name: p for name, p in model.named_parameters() if p.requires_grad}, parallel)
    return {**marks, "values": trained}


@pytest.mark.parametrize("expert_adapters", ["per_expert", "shared", "shared_outer"])
def test_initial_factors_are_the_same_at_every_layout(workers: WorkerPool, expert_adapters: str) -> None:
    one = workers(1, _initial, (1, 1, 1), expert_adapters)[0]["values"]
    for world, layout in ((2, (2, 1, 1)), (4, (2, 2, 2))):
        ranks = workers(world, _initial, layout, expert_adapters)
        for name, value in one.items():
            assert torch.equal(moe_runs.whole(ranks, [rank["values"][name] for rank in ranks], name), value), (
                layout,
                name,
            )


def _comes_and_goes() -> None:
    model, _ = model_at((1, 1, 1))
    ids = torch.arange(8)[None]
    keys, before = set(model.state_dict()), model(ids, ids, None, labels=ids)
    for _ in range(2):
        apply_lora(model, LoRAConfig(rank=4, target_modules=EXPERTS))
        added = set(model.state_dict()) - keys
        assert {name.partition("mlp.")[2] for name in added} == {f"{site}.lora.{f}" for site in EXPERTS for f in "ab"}
        for _, adapter in adapters(model):
            nn.init.normal_(adapter.b)
        assert not torch.equal(model(ids, ids, None, labels=ids), before)
        expert = model.decoder.layers[0].mlp.experts.local_experts[0]
        with pytest.raises(RuntimeError, match="one expert was called by itself; call the SequentialMLP"):
            expert(torch.zeros(1, 24), torch.ones(1))
        remove_lora(model)
        assert set(model.state_dict()) == keys
        assert torch.equal(model(ids, ids, None, labels=ids), before)


def test_adapters_come_and_go(workers: WorkerPool) -> None:
    workers(1, _comes_and_goes)


def _legacy_model() -> Any:
    model, _ = model_at((1, 1, 1), moe_shared_expert_intermediate_size=None)
    legacy = type("GroupedMLP", (nn.Module,), {})
    legacy.__module__ = "megatron.core.transformer.moe.experts"
    for layer in model.decoder.layers:
        layer.mlp.experts = legacy()
    return model


def _legacy_without_its_experts() -> set[str]:
    report = apply_lora(_legacy_model(), LoRAConfig(target_modules=[*DEFAULT_TARGETS], exclude_modules=["experts.*"]))
    return {site.site.rpartition(".")[2] for site in report.sites}


def test_a_model_with_legacy_experts_takes_the_advice(workers: WorkerPool) -> None:
    assert workers(1, _legacy_without_its_experts)[0] == {"linear_qkv", "linear_proj"}


def _refused(kind: str) -> None:
    model = _legacy_model() if kind == "legacy" else model_at((1, 1, 1))[0]
    layer: Any = model.decoder.layers[0].mlp
    targets = ["linear_fc1", "linear_fc2"]
    if kind == "fused":
        layer.experts._with_fused_impl = True
    elif kind == "fused shared":
        layer.shared_experts.__class__ = type("FusedSharedExpertMLP", (type(layer.shared_experts),), {})
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    try:
        apply_lora(model, LoRAConfig(rank=4, target_modules=targets))
    finally:
        assert before == {name for name, p in model.named_parameters() if p.requires_grad}, "left as it was"


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("legacy", r"layers.0.mlp.experts: the legacy GroupedMLP keeps .* or moe_grouped_gemm=False"),
        ("fused", r"layers.0.mlp.experts.linear_fc1 cannot have an adapter: use_transformer_engine_op_fuser=True"),
        ("fused shared", r"shared_experts.linear_fc1 cannot have an adapter: use_grouped_gemm_for_shared_expert"),
    ],
)
def test_what_bypasses_linears_is_refused(workers: WorkerPool, kind: str, match: str) -> None:
    with pytest.raises(WorkerError, match=f"NotImplementedError: .*{match}"):
        workers(1, _refused, kind)


def _merged(layout: tuple[int, int, int]) -> float:
    """How far a model with merged weights is from the model with adapters, experts among them."""
    model, _ = model_at(layout)
    ids = torch.arange(8)[None]
    targets = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
    apply_lora(model, LoRAConfig(rank=4, target_modules=targets, dora=True, canonical=True))
    for _, adapter in adapters(model):
        nn.init.normal_(adapter.b, std=0.1, generator=torch.Generator().manual_seed(5))
        adapter.magnitude.data *= 1.3
    expected = model(ids, ids, None, labels=ids).detach()
    before = {name: value.clone() for name, value in model.named_parameters()}
    merge_lora(model.eval())
    merge_lora(model)
    merged = model(ids, ids, None, labels=ids)
    unmerge_lora(model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    merge_lora(model)
    remove_lora(model)
    assert torch.equal(model(ids, ids, None, labels=ids), merged)
    return (merged - expected).abs().max().item()


@pytest.mark.parametrize(("world", "layout"), [(1, (1, 1, 1)), (2, (2, 1, 2))])
def test_merged_weights_give_the_same(workers: WorkerPool, world: int, layout: tuple[int, int, int]) -> None:
    assert max(workers(world, _merged, layout)) < 1e-5


def _dora_without_weights() -> None:
    _, parallel = model_at((1, 1, 1))
    model = expert_runs.build(parallel, grouped=True)
    model.linear_fc1.weight = model.linear_fc1.weight0  # as moe_single_grouped_weight leaves it
    del model.linear_fc1.weight0
    apply_lora(model, LoRAConfig(rank=4, target_modules=["linear_fc1"], dora=True))


def test_dora_needs_each_experts_weight(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"dora=True needs a weight at linear_fc1.*moe_single_grouped_weight"):
        workers(1, _dora_without_weights)
