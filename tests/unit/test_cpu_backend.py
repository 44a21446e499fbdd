"""The CPU backend: every patch is found and needed, all is undone, nothing happens with CUDA."""

import importlib
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from lightning_mcore_lora import cpu_backend
from lightning_mcore_lora.cpu_backend import PATCHES, Patch
from tests.workers import WorkerError, WorkerPool

DOCS = Path(__file__).parents[2] / "docs" / "cpu_backend.md"
MCORE = Version(version("megatron-core"))
INSTALLED = [p for p in PATCHES if Version(p.since) <= MCORE and (p.until is None or Version(p.until) > MCORE)]


def by_target(patch: Patch) -> str:
    return patch.target.rpartition(":")[2]


@pytest.mark.parametrize("patch", INSTALLED, ids=by_target)
def test_patch_is_found(patch: Patch) -> None:
    assert patch.applies(), f"{patch.target} is gone from Megatron-Core"
    source = inspect.getsource(importlib.import_module(patch.needed_by))
    assert patch.line in source, f"{patch.needed_by} no longer has the line {patch.line!r}"


def snapshot() -> dict[str, Any]:
    state = {}
    for patch in INSTALLED:
        owner, name = patch.owner()
        state[patch.target] = vars(owner).get(name, "missing")
    return state


def test_everything_is_undone() -> None:
    before = snapshot()
    with cpu_backend.active():
        inside = snapshot()
        with cpu_backend.active():
            pass
        assert snapshot().keys() == inside.keys()
        assert cpu_backend.is_active()
    assert not cpu_backend.is_active()
    after = snapshot()
    for target, value in before.items():
        assert inside[target] is not value or value is True, f"{target} was not replaced"
        assert after[target] is value or after[target] == value, f"{target} was not put back"


def test_inert_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = snapshot()
    with cpu_backend.active():
        assert not cpu_backend.is_active()
        assert all(value is before[target] for target, value in snapshot().items())


def test_stream_stays_a_class() -> None:
    with cpu_backend.active():
        assert torch.cuda.Stream | None  # transformers annotates so


def test_docs_show_the_table() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{p.target}` | `{p.needed_by}` | `{p.line}` | {p.why} | {p.since} to {p.until or 'now'} |" for p in PATCHES
    ]


# -- needed: what each patch is for fails, or gives something else, without it ---------------------------------------


def _run_without(leave_out: str | None, scenario: dict[str, Any]) -> None:
    from tests.mcore_runs import forward_backward

    cpu_backend.apply(leave_out=leave_out)
    queued = len(torch.cuda._queued_calls)
    forward_backward(**({"tp": 1, "ep": 1, "etp": None} | scenario))
    assert len(torch.cuda._queued_calls) == queued, "calls were queued for a CUDA device that never comes"


def _synchronize_without(leave_out: str | None) -> None:
    cpu_backend.apply(leave_out=leave_out)
    torch.cuda.synchronize()


MOE = {"num_moe_experts": 4}
ALL_TO_ALL = {"tp": 2, "ep": 2, "etp": 1, **MOE}
RANDOM = "megatron.core.tensor_parallel.random:"
LAYERS = "megatron.core.tensor_parallel.layers:"
MAPPINGS = "megatron.core.tensor_parallel.mappings:"
MOE_MODULES = "megatron.core.transformer.moe."
LAYERNORM = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
#: Target to the run that needs it.
NEEDS: dict[str, dict[str, Any]] = {
    "torch.cuda:current_device": {"tp": 2},
    "torch.cuda:current_stream": ALL_TO_ALL,
    MOE_MODULES + "token_dispatcher:MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": ALL_TO_ALL,
    MOE_MODULES + "shared_experts:SharedExpertMLP.stream": ALL_TO_ALL
    | {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 24},
    MOE_MODULES + "token_dispatcher:maybe_move_tensor_to_cpu": ALL_TO_ALL,
    RANDOM + "_CUDA_RNG_STATE_TRACKER": {"tp": 2},
    RANDOM + "_CUDA_RNG_STATE_TRACKER_INITIALIZED": {"tp": 2},
    RANDOM + "_get_cuda_rng_state": {"recompute_granularity": "full"},
    RANDOM + "_set_cuda_rng_state": {"recompute_granularity": "full"},
    RANDOM + "CheckpointWithoutOutput.__init__": LAYERNORM,
    "megatron.core.fusions.fused_softmax:get_default_causal_mask": {},
    "megatron.core.fusions.fused_softmax:get_sliding_window_causal_mask": {"window_size": (4, 0)},
    MAPPINGS + "_gather_along_first_dim": {"tp": 2, "ep": 2, "etp": 2, **MOE},
    LAYERS + "LinearWithFrozenWeight.backward": {"autocast": True, "frozen": True},
    LAYERS + "LinearWithGradAccumulationAndAsyncCommunication.backward": {"autocast": True},
    LAYERS + "RowParallelLinear.forward": {"add_bias_linear": True, **MOE},
}
if Version("0.19") > MCORE:
    NEEDS["megatron.core.transformer.moe.moe_utils:te_general_gemm"] = MOE


@pytest.mark.full  # what an update of Megatron-Core may change
@pytest.mark.parametrize("target", NEEDS, ids=lambda target: target.rpartition(":")[2])
def test_patch_is_needed(workers: WorkerPool, target: str) -> None:
    scenario = NEEDS[target]
    world = scenario.get("tp", 1) * (scenario.get("ep", 1) if scenario.get("etp", 1) > 1 else 1)
    workers(world, _run_without, None, scenario)
    with pytest.raises(WorkerError):
        workers(world, _run_without, target, scenario)


def test_synchronize_is_needed(workers: WorkerPool) -> None:
    workers(1, _synchronize_without, None)
    with pytest.raises(WorkerError):
        workers(1, _synchronize_without, "torch.cuda:synchronize")


def _streams_without(leave_out: str | None) -> list[int]:
    from megatron.core.tensor_parallel import random

    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes

    cpu_backend.apply(leave_out=leave_out)
    ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), 2, True))
    random.model_parallel_cuda_manual_seed(3)
    drawn = [int(torch.randint(1 << 40, ()))]
    for name in sorted(random.get_cuda_rng_tracker().get_states()):
        with random.get_cuda_rng_tracker().fork(name):
            drawn.append(int(torch.randint(1 << 40, ())))
    return drawn


def test_streams_follow_megatrons_seeds(workers: WorkerPool) -> None:
    for rank, drawn in enumerate(workers(2, _streams_without, None)):
        # default, data-parallel, expert-parallel and model-parallel stream, by Megatron-Core's offsets
        seeds = [3, 3, 3 + 1024, 3 + 2718 + rank]
        assert drawn == [int(torch.randint(1 << 40, (), generator=torch.Generator().manual_seed(s))) for s in seeds]
    with pytest.raises((WorkerError, AssertionError)):  # noqa: PT012
        for drawn in workers(
            2, _streams_without, "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed"
        ):
            assert len(drawn) == 4
            assert drawn[0] == int(torch.randint(1 << 40, (), generator=torch.Generator().manual_seed(3)))


def test_sliding_window_mask_equals_megatrons() -> None:
    from megatron.core.transformer import utils

    ours = cpu_backend._sliding_window_mask(utils.get_sliding_window_causal_mask)
    for sq, skv, window in ((5, 5, (2, 0)), (3, 7, (2, 1)), (6, 6, (3, 2))):
        m = torch.ones(sq, skv, dtype=torch.bool)
        expected = ~torch.tril(torch.triu(m, skv - sq - window[0]), skv - sq + window[1])
        assert torch.equal(ours(sq, skv, window), expected)
