"""Estimates against real models: what is held and what adapters keep to the byte, activations within 1 %."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.activations import quick_gelu

from tests import estimate_runs, families
from tests.workers import WorkerPool

BOUND = 0.01  # Megatron-Core's versions differ in the indices that a router keeps
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MIXTURE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
}
SHARED = MIXTURE | {"moe_shared_expert_intermediate_size": 40, "moe_layer_freq": [0, 1, 1, 1]}
GPT_OSS = {
    "activation_func": quick_gelu,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "add_bias_linear": True,
    "softmax_type": "learnable",
}
GPT2 = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


class Case(NamedTuple):
    """Fields of the model beside ``SHAPE``, settings of the adapters, (TP, EP, ETP) and SP."""

    config: dict[str, Any] = {}  # noqa: RUF012
    lora: dict[str, Any] = {}  # noqa: RUF012
    layout: tuple[int, int, int] = (2, 1, 2)
    sequence_parallel: bool = True
    precision: str = "32-true"


ONE = (1, 1, 1)
CASES: dict[str, Case] = {
    **{mode: Case(lora={"sequence_mode": mode}) for mode in ("gather", "regather", "local")},
    "TP=1": Case(layout=ONE),
    "SP off": Case(sequence_parallel=False),
    "uniform": Case(UNIFORM),
    "uniform, TP=1": Case(UNIFORM, layout=ONE),
    "block": Case(BLOCK),
    **{
        f"{mode}, {name}": Case(selective(name), {"sequence_mode": mode})
        for name in ("mlp", "core_attn", "layernorm")
        for mode in ("gather", "regather", "local")
    },
    "as many keys as queries": Case({"num_query_groups": 4}, layout=ONE),
    "norms of heads": Case({"qk_layernorm": True}),
    "norms of heads, as many keys": Case({"qk_layernorm": True, "num_query_groups": 4}),
    "norms of heads, copied queries": Case({"qk_layernorm": True}, layout=ONE),
    "norms of heads, core_attn": Case({"qk_layernorm": True} | selective("core_attn"), layout=ONE),
    "norms of heads, LayerNorm": Case({"qk_layernorm": True, "normalization": "LayerNorm"}),
    "all that is selective": Case(selective("core_attn", "mlp", "layernorm")),
    "GPT-2": Case(GPT2),
    "GPT-OSS, dense": Case(GPT_OSS | {"window_size": (8, 0)}),
    "GPT-OSS": Case(GPT_OSS | MIXTURE, layout=(2, 1, 1)),
    "dropout of scores": Case({"attention_dropout": 0.1}, layout=ONE),
    "dropout of hidden states": Case({"hidden_dropout": 0.1}),
    "dropout of hidden states, bf16-true": Case({"hidden_dropout": 0.1, "bf16": True}, precision="bf16-true"),
    "dropout, recomputed inputs": Case(lora={"dropout": 0.1, "recompute_inputs": True}),
    "DoRA, canonical": Case(lora={"dora": True, "canonical": True}),
    "A frozen": Case(lora={"freeze_a": True, "recompute_inputs": True}),
    "bfloat16 factors": Case(lora={"dtype": "bfloat16"}),
    "some layers": Case(lora={"layers_to_transform": [1, 2]}),
    "upper linears": Case(lora={"target_modules": ["linear_fc2"], "layers_to_transform": [1, 2]}),
    **{
        f"{name}, recomputed inputs": Case(lora={"target_modules": [name], "recompute_inputs": True})
        for name in ("linear_fc1", "linear_fc2")
    },
    "output layer": Case(lora={"target_modules": ["linear_qkv", "output_layer"]}),
    "in full": Case(
        lora={
            "target_modules": ["linear_qkv"],
            "modules_to_save": ["output_layer", "word_embeddings", "final_layernorm"],
        }
    ),
    "mixture": Case(MIXTURE, layout=ONE),
    "mixture, EP=2": Case(MIXTURE, layout=(1, 2, 1)),
    "mixture, TP=2 EP=2 ETP=2": Case(MIXTURE, layout=(2, 2, 2)),
    "router": Case(MIXTURE, {"target_modules": ["router", "linear_fc1"]}),
    "shared experts": Case(SHARED),
    "shared experts, TP=2 EP=2 ETP=1": Case(SHARED, layout=(2, 2, 1)),
    "shared experts, overlap": Case(SHARED | {"moe_shared_expert_overlap": True}),
    "shared experts, gate": Case(SHARED | {"moe_shared_expert_gate": True}),
    "shared factors": Case(MIXTURE, {"expert_adapters": "shared_outer"}, layout=(1, 2, 1)),
    "moe": Case(SHARED | selective("moe")),
    "recomputed shared experts": Case(SHARED | selective("shared_experts")),
    "mixture, block": Case(SHARED | BLOCK),
    "bf16-true": Case({"bf16": True}, layout=ONE, precision="bf16-true"),
    "bf16-true, norms of heads": Case({"bf16": True, "qk_layernorm": True}, precision="bf16-true"),
    "bf16-true, shared experts": Case(SHARED | {"bf16": True}, precision="bf16-true"),
    "bf16-mixed": Case(precision="bf16-mixed"),
    "bf16-mixed, LayerNorm": Case({"normalization": "LayerNorm"}, precision="bf16-mixed"),
    "bf16-mixed, uniform": Case(UNIFORM, precision="bf16-mixed"),
    "bf16-mixed, block": Case(BLOCK, precision="bf16-mixed"),
    "bf16-mixed, mlp": Case(selective("mlp"), precision="bf16-mixed"),
    "bf16-mixed, mixture": Case(MIXTURE, layout=ONE, precision="bf16-mixed"),
    "bf16-mixed, moe": Case(SHARED | selective("moe"), precision="bf16-mixed"),
    "bf16-true, GPT-2": Case(GPT2 | {"bf16": True}, precision="bf16-true"),
    "bf16-true, in full": Case(
        {"bf16": True}, {"modules_to_save": ["word_embeddings", "output_layer"]}, precision="bf16-true"
    ),
}
QUICK = (
    "gather",
    "regather",
    "local, mlp",
    "uniform",
    "some layers",
    "in full",
    "shared experts",
    "mixture, EP=2",
    "bf16-true",
    "bf16-mixed, uniform",
)


def check(workers: WorkerPool, case: Case, batch: int = 2, sequence: int = 24) -> None:
    tp, ep, etp = case.layout
    arguments = (case.layout, tp > 1 and case.sequence_parallel, SHAPE | case.config, {"rank": 6} | case.lora)
    ranks = workers(max(tp, ep * etp), estimate_runs.counted, *arguments, batch, sequence, case.precision)
    for rank in ranks:
        estimated = rank["estimate"].components
        assert rank["held"] == {name: estimated.get(name, 0) for name in rank["held"]}
        assert {site.site: site.cost for site in rank["estimate"].sites} == rank["costs"]

    def mean(name: str) -> float:  # experts of one rank get more tokens than those of another
        return sum(rank[name] for rank in ranks) / len(ranks)

    if "modules_to_save" not in case.lora:
        assert estimated.get("adapters' inputs and z", 0) == mean("kept by adapters")
    assert ranks[0]["estimate"].after_forward == pytest.approx(mean("kept"), rel=BOUND)


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in CASES])
def test_estimate_is_what_is_counted(workers: WorkerPool, case: str) -> None:
    check(workers, CASES[case])


@pytest.mark.full
@pytest.mark.parametrize("layout", [ONE, (2, 1, 2)])
def test_a_model_of_100m(workers: WorkerPool, layout: tuple[int, int, int]) -> None:
    shape = {
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_hidden_size": 2304,
        "num_attention_heads": 12,
        "num_query_groups": 4,
        "kv_channels": 64,
    }
    check(workers, Case(shape, {"rank": 16}, layout), 1, 256)


@pytest.mark.parametrize("layout", [(2, 1, 1), pytest.param((1, 2, 1), marks=pytest.mark.full)])
def test_skeletons_have_the_models_parameters(
    workers: WorkerPool, models: dict[str, Path], layout: tuple[int, int, int]
) -> None:
    directories = {n: str(path) for n, path in models.items() if layout[1] == 1 or n in families.MIXTURES}
    for rank in workers(2, estimate_runs.parameters, directories, layout):
        for name, (model, skeleton) in rank.items():
            assert skeleton == model, name
