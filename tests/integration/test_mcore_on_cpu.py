"""Megatron-Core on the CPU gives the same at every layout, and with every way of recomputing."""

from typing import Any

import pytest
import torch

from tests.mcore_runs import reduced_step, whole_gradients
from tests.workers import WorkerPool

MOE = {"num_moe_experts": 4, "moe_router_topk": 2}
SHARED = MOE | {"moe_shared_expert_intermediate_size": 24}
BOUND = 2e-5


def check(workers: WorkerPool, world: int, layout: tuple[int, int, int], **config: Any) -> None:
    reference_config = {k: v for k, v in config.items() if not k.startswith(("recompute", "moe_shared_expert_overlap"))}
    reference = workers(1, reduced_step, 1, 1, 1, **reference_config)[0]
    expected = whole_gradients([reference])
    ranks = workers(world, reduced_step, *layout, **config)
    loss = sum(rank["loss"] for rank in ranks) / world
    assert abs(loss - reference["loss"]) < 1e-5 * reference["loss"]
    whole = whole_gradients(ranks)
    assert whole.keys() == expected.keys()
    for name, value in whole.items():
        error = ((value - expected[name]).abs().max() / expected[name].abs().max()).item()
        assert error < BOUND, f"{name}: {error}"
    for rank in ranks:
        assert abs(rank["norm"] - reference["norm"]) < BOUND * reference["norm"]


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (2, 1), (4, 2)])
def test_dense(workers: WorkerPool, world: int, tp: int) -> None:
    check(workers, world, (tp, 1, tp))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, (2, 1, 2)),
        pytest.param(2, (2, 1, 1)),
        pytest.param(2, (2, 2, 1), marks=pytest.mark.full),
        pytest.param(4, (2, 2, 2)),
        pytest.param(2, (1, 2, 1), marks=pytest.mark.full),
        pytest.param(4, (1, 4, 1), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.full)])
def test_moe(workers: WorkerPool, world: int, layout: tuple[int, int, int], dispatcher: str) -> None:
    check(workers, world, layout, moe_token_dispatcher_type=dispatcher, **MOE)


@pytest.mark.parametrize("overlap", [False, True])
def test_shared_experts(workers: WorkerPool, overlap: bool) -> None:
    check(workers, 2, (2, 1, 2), moe_shared_expert_overlap=overlap, **SHARED)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ],
    ids=lambda config: "-".join(config.get("recompute_modules", ["full"])),
)
def test_recompute(workers: WorkerPool, recompute: dict[str, Any]) -> None:
    check(workers, 2, (2, 1, 2), **recompute)


def test_recompute_replays_dropout(workers: WorkerPool) -> None:
    dropout = {"hidden_dropout": 0.3, "attention_dropout": 0.2}
    plain = whole_gradients(workers(2, reduced_step, 2, 1, 2, **dropout))
    again = whole_gradients(workers(2, reduced_step, 2, 1, 2, recompute_granularity="full", **dropout))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize(
    ("microbatches", "by_tokens"),
    [(2, False), pytest.param(1, True, marks=pytest.mark.full), pytest.param(2, True, marks=pytest.mark.full)],
)
def test_auxiliary_loss_keeps_its_share(workers: WorkerPool, microbatches: int, by_tokens: bool) -> None:
    """The same batch taken twice, or its loss given as a sum with its tokens, is the same step for the router too."""
    aux = MOE | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
    once = whole_gradients(workers(2, reduced_step, 2, 1, 2, **aux))
    without = whole_gradients(workers(2, reduced_step, 2, 1, 2, **MOE))
    other = whole_gradients(workers(2, reduced_step, 2, 1, 2, microbatches=microbatches, by_tokens=by_tokens, **aux))
    router = next(name for name in once if "router.weight" in name)
    scale = once[router].abs().max()
    assert (without[router] - once[router]).abs().max() > 0.05 * scale, "the auxiliary loss matters here"
    assert (other[router] - once[router]).abs().max() < BOUND * scale
