"""Sizes: what does not fit is refused with the setting and the fix."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mcore_lora.parallel import ParallelContext, ParallelSizeError, ParallelSizes
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"world_size": 4, "tensor": 3}, r"world_size=4 is not divisible by tensor_parallel_size=3.*multiple of it"),
        ({"world_size": -2}, "world_size=-2 must be a positive integer"),
        ({"world_size": 2, "tensor": 0}, "tensor_parallel_size=0 must be a positive integer"),
        ({"world_size": 2, "tensor": 2.0}, r"tensor_parallel_size=2.0 must be a positive integer"),
        ({"world_size": 2, "expert": 3}, r"expert_parallel_size \* expert_tensor_parallel_size=3"),
        ({"world_size": 2, "sequence_parallel": True}, "sequence_parallel=True needs tensor_parallel_size > 1"),
    ],
)
def test_sizes_are_checked(sizes: dict[str, Any], match: str) -> None:
    with pytest.raises(ParallelSizeError, match=match):
        ParallelSizes(**sizes)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((None, 1, None, 1, None), ParallelSizes(1, 1, False, 1, 1)),
        ((None, 4, None, 2, None), ParallelSizes(8, 4, True, 2, 4)),
        ((None, 4, None, 2, 1), ParallelSizes(4, 4, True, 2, 1)),
        ((16, 4, False, 2, 1), ParallelSizes(16, 4, False, 2, 1)),
    ],
)
def test_what_is_left_out_is_completed(given: Any, sizes: ParallelSizes) -> None:
    assert ParallelSizes.completed(*given) == sizes


def config(**changes: Any) -> Any:
    fields = {
        "num_attention_heads": 6,
        "num_query_groups": 6,
        "ffn_hidden_size": 12,
        "num_moe_experts": None,
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": None,
        "add_bias_linear": False,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("sizes", "changes", "match"),
    [
        ({"tensor": 2}, {"num_attention_heads": 9}, "num_attention_heads=9 .* tensor_parallel_size=2"),
        ({"tensor": 2}, {"num_query_groups": 3}, r"num_query_groups \(key-value heads\)=3"),
        ({"tensor": 2}, {"ffn_hidden_size": 9}, "ffn_hidden_size=9"),
        ({"expert": 2}, {}, "expert_parallel_size=2, but the model has no experts"),
        ({"expert": 2}, {"num_moe_experts": 3}, "num_moe_experts=3 .* expert_parallel_size=2"),
        (
            {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2},
            {"num_moe_experts": 2, "moe_ffn_hidden_size": 9},
            "moe_ffn_hidden_size=9 .* expert_tensor_parallel_size=2",
        ),
        (
            {"tensor": 2, "sequence_parallel": True},
            {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 9},
            "moe_shared_expert_intermediate_size=9 .* tensor_parallel_size=2",
        ),
        ({"tensor": 2}, {"num_moe_experts": 2}, "needs sequence_parallel=True"),
        (
            {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2},
            {"num_moe_experts": 2, "moe_ffn_hidden_size": 8, "add_bias_linear": True},
            "The experts have biases, .* expert_tensor_parallel_size=1",
        ),
    ],
)
def test_models_are_checked(sizes: dict[str, Any], changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ParallelSizeError, match=match):
        ParallelSizes(2, **sizes).check_model(config(**changes))


def test_sequence_is_checked() -> None:
    sizes = ParallelSizes(3, 3, sequence_parallel=True)
    sizes.check_sequence(9)
    with pytest.raises(ParallelSizeError, match=r"sequence length=10 .* pad each batch"):
        sizes.check_sequence(10)
    ParallelSizes(3, 3).check_sequence(10)


def _create_often() -> list[tuple[int, ...]]:
    from megatron.core import parallel_state

    seen = []
    for tensor in (2, 2, 1, 4):
        context = ParallelContext.create(ParallelSizes(4, tensor, tensor > 1, 1, tensor))
        before = parallel_state.get_tensor_model_parallel_group()
        assert ParallelContext.create(context.sizes).tp_group is before, "same sizes keep the groups"
        seen.append((context.tp_rank, context.dp_rank, context.tp_group.size(), context.dp_group.size()))
    context.destroy()
    context.destroy()
    assert not parallel_state.model_parallel_is_initialized()
    return seen


def test_groups_are_made_and_destroyed_repeatedly(workers: WorkerPool) -> None:
    for rank, seen in enumerate(workers(4, _create_often)):
        assert seen == [
            (rank % 2, rank // 2, 2, 2),
            (rank % 2, rank // 2, 2, 2),
            (0, rank, 1, 4),
            (rank, 0, 4, 1),
        ]
