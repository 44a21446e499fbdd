"""Adapters: settings, targets, fall-backs, report."""

import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_mcore_lora import (
    LoRAConfig,
    LoRAReport,
    LoRASPCallback,
    apply_lora,
    check_gradients,
    lora_plus_groups,
    remove_lora,
)
from lightning_mcore_lora.adapters import SiteReport, adapters
from lightning_mcore_lora.adapters.cost import Cost
from lightning_mcore_lora.adapters.matching import matches
from lightning_mcore_lora.adapters.placement import TABLE, Factor, lookup
from lightning_mcore_lora.adapters.report import TRAINED
from tests.workers import WorkerError, WorkerPool

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rank": 0}, "rank=0 must be a positive integer"),
        ({"rank": 1.5}, "rank=1.5 must be a positive integer"),
        ({"alpha": -1}, "alpha=-1 must be a positive number"),
        ({"dropout": "0.1"}, "dropout='0.1' must be a number"),
        ({"layers_to_transform": "12"}, "layers_to_transform='12' must be numbers of layers"),
        ({"sequence_mode": "best"}, "sequence_mode='best' must be one of"),
        ({"target_modules": "linear_qkv"}, "must be a list of names"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["linear_*"]}, r"target_modules: 'linear_\*' has the component 'linear_\*'"),
        ({"dropout": 1.0}, "dropout=1.0 must be a number, at least 0 and below 1"),
        ({"rank_pattern": {"linear_qkv": 0}}, r"rank_pattern\['linear_qkv'\]=0 must be a positive integer"),
        ({"init": "pissa"}, "it changes the frozen base weights"),
        ({"init": "zeros"}, "init='zeros' must be one of"),
        ({"dtype": "float8"}, "dtype='float8' must be one of"),
    ],
)
def test_config_is_checked(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LoRAConfig(**settings)


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ({}, "auto"),
        ({"regather": True}, "regather"),
        ({"regather": False}, "gather"),
        ({"regather": True, "sequence_mode": "regather"}, "regather"),
        ({"sequence_mode": "local"}, "local"),
        ({"config": LoRAConfig(sequence_mode="gather")}, "gather"),
    ],
)
def test_callback_shorthand(arguments: dict[str, Any], mode: str) -> None:
    assert LoRASPCallback(**arguments).config.sequence_mode == mode
    assert LoRASPCallback(**arguments).config.rank == 16


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"regather": True, "sequence_mode": "local"}, "regather=True means sequence_mode='regather', not 'local'"),
        ({"config": LoRAConfig(), "rank": 4}, r"config and \['rank'\] are both given"),
        ({"ranks": 4}, r"unknown setting among \['ranks'\]; known: \['alpha', .*'rank'"),
    ],
)
def test_callback_refuses_contradictions(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LoRASPCallback(**arguments)


def test_table_has_one_row_for_each_case() -> None:
    keys = [(row.kind, row.sequence, row.mode) for row in TABLE]
    assert len(set(keys)) == len(keys)
    for row in TABLE:
        assert lookup(row.kind, row.sequence, row.mode) is row
        # A replicated factor's gradient is summed where, and only where, its ranks see different tokens.
        assert not row.sum_a or (row.a is Factor.REPLICATED and row.sequence)
        assert not row.sum_b or (row.b is Factor.REPLICATED and row.sequence)
    with pytest.raises(KeyError, match="no placement for kind='diagonal'"):
        lookup("diagonal", True, "local")


def test_report_groups_equal_layers() -> None:
    path, shared = "decoder.layers.{}.mlp.linear_fc1", {"kind": "column", "placement": "A, B", "rank": 4}
    cost = Cost(kept_per_token=2.0, sent_per_token=1.0, sent_per_step=512.0)
    sites = [SiteReport(path.format(i), mode="local", parameters=10, cost=cost, **shared) for i in range(3)]
    sites.append(SiteReport(path.format(3), mode="gather", reason="because", parameters=10, **shared))
    sites.append(SiteReport("output_layer", reason="tied"))
    sites.append(SiteReport("decoder.final_layernorm", mode=TRAINED, parameters=10))
    report = LoRAReport(tuple(sites), base_parameters=960)
    text = str(report)
    assert text.count("linear_fc1") == 2
    assert "6 KiB" in text, "kept by three layers and 1024 tokens"
    assert "4.5 KiB" in text, "sent by three layers"
    assert report.cost.kept(100) == 600
    assert report.cost.sent(100, microbatches=3) == 3 * 3 * 100 + 3 * 512
    assert "layers.*.mlp" in text
    assert "because" in text
    assert "not adapted" in text
    with Console(width=80, record=True, file=io.StringIO()) as narrow:
        narrow.print(report)
    assert "because" in narrow.export_text(), "a reason is never cut off"
    assert "50 trainable of 1,000 parameters (5.00 %)" in text
    assert report.to_dict()["sites"][3]["reason"] == "because"
    assert [site.site for site in report.fallbacks] == ["decoder.layers.3.mlp.linear_fc1"]


# -- in a model ----------------------------------------------------------------------------------------------


def _model(tp: int, sequence: bool | None = None, **config: Any) -> Any:
    from lightning_mcore_lora import cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding
    from tests.mcore_runs import moe_or_dense_model

    cpu_backend.apply()
    sequence = tp > 1 if sequence is None else sequence
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, sequence, 1, tp))
    seeding.seed_for_init()
    return moe_or_dense_model(parallel, **config)


def _apply(tp: int, lora: dict[str, Any], model_config: dict[str, Any]) -> tuple[LoRAReport, list[str]]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    logger = logging.getLogger("lightning_mcore_lora")
    logger.addHandler(handler)
    try:
        model = _model(tp, model_config.pop("sequence", None))
        for name, value in model_config.items():  # after building, since CUDA graphs and offloading need a GPU there
            setattr(model.config, name, value)
        return apply_lora(model, LoRAConfig(rank=4, **lora)), records
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("tp", "model_config", "site", "reason"),
    [
        (1, {}, "linear_qkv", "tensor_parallel_size is 1"),
        (2, {"sequence": False}, "linear_fc1", "sequence parallelism is off"),
        (2, {"cpu_offloading": True}, "linear_qkv", "cpu_offloading"),
        (2, {"enable_cuda_graph": True}, "linear_qkv", "CUDA graphs are on"),
        (2, {"recompute_granularity": "full"}, "linear_fc1", "recompute_granularity is 'full'"),
        (2, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "linear_fc1", "has 'mlp'"),
        (2, {"target": "output_layer"}, "output_layer", "only linear_qkv and linear_fc1 re-gather"),
    ],
    ids=["tp", "sequence", "offload", "graphs", "full", "mlp", "name"],
)
def test_every_fallback_says_why(
    workers: WorkerPool, tp: int, model_config: dict[str, Any], site: str, reason: str
) -> None:
    lora: dict[str, Any] = {"sequence_mode": "regather"}
    model_config = dict(model_config)
    if "target" in model_config:
        lora["target_modules"] = [model_config.pop("target")]
    ranks = workers(tp, _apply, tp, lora, model_config)
    report, warnings = ranks[0]
    entries = [entry for entry in report.sites if entry.site.endswith(site)]
    assert entries
    assert all(entry.mode == "gather" and reason in (entry.reason or "") for entry in entries)
    assert all(word in str(report) for word in reason.split()), "the table folds between words"
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert all(not messages for _, messages in ranks[1:]), "only rank zero warns"


SELECTIVE = {"recompute_granularity": "selective"}


@pytest.mark.parametrize(
    ("lora", "model_config", "site", "reason"),
    [
        ({}, {}, "linear_proj", "no norm or activation is known to compute its input"),
        ({}, {}, "linear_fc2", None),
        ({"sequence_mode": "gather"}, {}, "linear_qkv", "recompute_inputs needs sequence_mode='local'"),
        ({}, {"cpu_offloading": True}, "linear_fc1", "cpu_offloading"),
        ({}, {"enable_cuda_graph": True}, "linear_fc2", "CUDA graphs are on"),
        ({}, SELECTIVE | {"recompute_modules": ["mlp"]}, "linear_fc2", "has 'mlp'"),
        ({}, SELECTIVE | {"recompute_modules": ["layernorm"]}, "linear_qkv", "has 'layernorm'"),
    ],
)
def test_inputs_that_are_not_recomputed_say_why(
    workers: WorkerPool, lora: dict[str, Any], model_config: dict[str, Any], site: str, reason: str | None
) -> None:
    report, _ = workers(2, _apply, 2, {"recompute_inputs": True} | lora, dict(model_config))[0]
    for entry in (entry for entry in report.sites if entry.site.endswith(site)):
        assert (reason or "") in (entry.reason or "")
        assert (reason is None) == (entry.reason is None)


def test_dropout_needs_cuda_graphs_off(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"dropout needs CUDA graphs off at decoder.layers.0.*Set dropout=0"):
        workers(1, _apply, 1, {"dropout": 0.1}, {"enable_cuda_graph": True})


def test_selective_mlp_leaves_qkv_regathering(workers: WorkerPool) -> None:
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    report, _ = workers(2, _apply, 2, {"sequence_mode": "regather"}, recompute)[0]
    assert {s.mode for s in report.sites if s.site.endswith("linear_qkv")} == {"regather"}
    assert not [s for s in report.sites if s.site.endswith("linear_fc2") and s.reason]


def test_auto_is_local_without_a_warning(workers: WorkerPool) -> None:
    report, warnings = workers(2, _apply, 2, {}, {})[0]
    assert {site.mode for site in report.sites} == {"local"}
    assert not warnings
    assert report.trainable_parameters == 2 * 4 * ((24 + 72) + (24 + 24) + (24 + 96) + (48 + 24))


def _apply_moe(moe: dict[str, Any]) -> LoRAReport:
    return apply_lora(_model(1, **moe), LoRAConfig(rank=4))


def test_experts_are_left_alone_and_said(workers: WorkerPool) -> None:
    moe = {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 24}
    report = workers(1, _apply_moe, moe)[0]
    reasons = {entry.reason for entry in report.sites if not entry.mode}
    assert reasons == {"expert linears are not supported yet", "shared-expert linears are not supported yet"}


# -- targets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("linear_fc1", "decoder.layers.1.mlp.linear_fc1", True),
        ("mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc1", True),
        ("fc1", "decoder.layers.1.mlp.linear_fc1", False),
        ("*.layers.1.*", "decoder.layers.1.mlp.linear_fc1", True),
        ("*.layers.1.*", "decoder.layers.11.mlp.linear_fc1", False),
        ("*.layers.1.linear_fc1", "decoder.layers.1.mlp.linear_fc1", False),
        ("layers.1.*.linear_fc1", "decoder.layers.1.mlp.linear_fc1", True),
        ("*.linear_fc1", "linear_fc1", False),
        ("output_layer", "output_layer", True),
    ],
)
def test_patterns(pattern: str, path: str, hit: bool) -> None:
    assert matches(pattern, path) == hit


def _adapted(lora: dict[str, Any], **config: Any) -> list[str]:
    return [site.site for site in apply_lora(_model(1, **config), LoRAConfig(rank=4, **lora)).sites]


FC1, FC2 = (f"decoder.layers.{{}}.mlp.linear_fc{i}" for i in (1, 2))


@pytest.mark.parametrize(
    ("lora", "adapted"),
    [
        ({"target_modules": ["linear_fc1"]}, [FC1.format(0), FC1.format(1)]),
        ({"target_modules": ["*.layers.1.*"], "exclude_modules": ["self_attention.*"]}, [FC1.format(1), FC2.format(1)]),
        ({"target_modules": ["linear_fc2"], "layers_to_transform": [1]}, [FC2.format(1)]),
        ({"target_modules": ["linear_fc2", "output_layer"], "layers_to_transform": 0}, [FC2.format(0)]),
        ({"target_modules": ["output_layer"]}, ["output_layer"]),
        (
            {"target_modules": ["output_layer"], "modules_to_save": ["mlp", "final_layernorm"]},
            ["output_layer", "decoder.layers.0.mlp", "decoder.layers.1.mlp", "decoder.final_layernorm"],
        ),
    ],
)
def test_targets(workers: WorkerPool, lora: dict[str, Any], adapted: list[str]) -> None:
    assert workers(1, _adapted, lora)[0] == adapted


def _second_stage() -> list[str]:
    model = _model(1)
    for layer in model.decoder.layers:
        layer.layer_number += 2  # as on the second of two pipeline stages
    report = apply_lora(model, LoRAConfig(rank=4, target_modules=("linear_fc1",), layers_to_transform=(3,)))
    return [site.site for site in report.sites]


def test_layers_are_numbered_over_pipeline_stages(workers: WorkerPool) -> None:
    assert workers(1, _second_stage)[0] == [FC1.format(3)]


def _counts() -> dict[str, Any]:
    model = _model(1)
    lora = {"target_modules": ("linear_qkv",), "rank_pattern": {"*.layers.1.*": 2}, "alpha_pattern": {"linear_qkv": 6}}
    report = apply_lora(model, LoRAConfig(rank=4, dora=True, modules_to_save=("final_layernorm",), **lora))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "counted": trainable,
        "reported": report.trainable_parameters,
        "total": (sum(p.numel() for p in model.parameters()), report.total_parameters),
        "ranks": [site.rank for site in report.sites],
        "scales": [adapter.plan.scale for _, adapter in adapters(model)],
    }


def test_report_counts_what_trains(workers: WorkerPool) -> None:
    found = workers(1, _counts)[0]
    assert found["counted"] == found["reported"] == 4 * (24 + 72) + 2 * (24 + 72) + 2 * 72 + 24
    assert found["total"][0] == found["total"][1]
    assert found["ranks"] == [4, 2, None]
    assert found["scales"] == [1.5, 3.0]


def _two_models() -> list[str]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _model(1), _model(1)

    two = Two()
    apply_lora(two, LoRAConfig(rank=4, target_modules=("linear_qkv",), modules_to_save=("final_layernorm",)))
    return [name for name, p in two.named_parameters() if p.requires_grad and "lora" not in name]


def test_each_of_two_models_is_matched(workers: WorkerPool) -> None:
    assert workers(1, _two_models)[0] == [f"{name}.decoder.final_layernorm.weight" for name in ("first", "second")]


def _zero_row() -> bool:
    model = _model(1)
    with torch.no_grad():
        model.output_layer.weight[3] = 0
    apply_lora(model, LoRAConfig(rank=4, dora=True, target_modules=("output_layer",)))
    ids = torch.arange(8)[None]
    loss = model(ids, ids, None, labels=ids).mean()
    loss.backward()
    return bool(loss.isfinite()) and all(p.grad.isfinite().all() for p in model.output_layer.lora.parameters())


def test_dora_stands_a_row_of_zeros(workers: WorkerPool) -> None:
    assert workers(1, _zero_row)[0]


def _groups() -> dict[str, Any]:
    model = _model(1)
    apply_lora(model, LoRAConfig(rank=4, dora=True, freeze_a=True, modules_to_save=("final_layernorm",)))
    rest, high = lora_plus_groups(model, lr=1e-3, ratio=4.0)
    names = {id(p): name for name, p in model.named_parameters()}
    return {"rest": {names[id(p)].rpartition(".")[2] for p in rest["params"]}, "high": high, "names": names}


def test_lora_plus_groups(workers: WorkerPool) -> None:
    found = workers(1, _groups)[0]
    assert found["rest"] == {"magnitude", "weight"}, "a frozen A is in no group"
    assert found["high"]["lr"] == 4e-3
    assert len(found["high"]["params"]) == 8


def _initial(init: str) -> tuple[torch.Tensor, ...]:
    model = _model(1)
    apply_lora(model, LoRAConfig(rank=8, init=init, canonical=True, dtype="bfloat16"))
    adapter = next(a for _, a in adapters(model) if a.site.leaf == "linear_qkv")
    assert adapter.a.dtype == adapter.b.dtype == torch.bfloat16
    return tuple(adapter.a.detach().float().chunk(3))


@pytest.mark.parametrize(
    ("init", "largest", "spread"),
    [
        ("kaiming", 24**-0.5, (24 * 3) ** -0.5),
        ("xavier", (6 / 32) ** 0.5, (2 / 32) ** 0.5),
        ("gaussian", None, 1 / 8),
    ],
)
def test_initial_a(workers: WorkerPool, init: str, largest: float | None, spread: float) -> None:
    parts = workers(1, _initial, init)[0]
    assert not torch.equal(parts[0], parts[1]), "q, k and v are drawn apart"
    for part in parts:
        assert part.std().item() == pytest.approx(spread, rel=0.2)
        if largest is not None:
            assert 0.9 * largest < part.abs().max() <= largest * 1.01


@pytest.mark.parametrize(
    ("tp", "lora", "match"),
    [
        (1, {"exclude_modules": ["linear_fc3"]}, r"exclude_modules: 'linear_fc3' matches no linear.*near.*'linear_fc"),
        (1, {"rank_pattern": {"output_layer": 2}}, r"'output_layer' matches none of the linears that target_modules"),
        (1, {"exclude_modules": ["*"]}, r"exclude_modules=\('\*',\) and layers_to_transform=None leave none"),
        (1, {"rank_pattern": {"*.layers.7.*": 2}}, r"rank_pattern: '\*.layers.7.\*' matches no linear"),
        (1, {"modules_to_save": ["final_layernrom"]}, r"no module of the model; near names: \['final_layernorm'"),
        (1, {"modules_to_save": ["mlp"]}, r"linear_fc1'.* are in target_modules and in modules_to_save"),
        (1, {"layers_to_transform": [1, 5]}, r"layers_to_transform: the model has no layer \[5\]; it has \[0, 1\]"),
        (3, {"sequence_mode": "regather"}, r"rank=4 is not divisible by tensor_parallel_size=3.*sequence_mode='local'"),
        (
            1,
            {"target_modules": ["linear_kqv"]},
            r"'linear_kqv' matches no linear of the model; near names: \['linear_qkv",
        ),
    ],
)
def test_what_cannot_be_is_refused(workers: WorkerPool, tp: int, lora: dict[str, Any], match: str) -> None:
    with pytest.raises(WorkerError, match=match):
        workers(tp, _refused, tp, lora)


def _refused(tp: int, lora: dict[str, Any]) -> None:
    model = _model(tp, num_attention_heads=6, vocab_size=66)
    try:
        apply_lora(model, LoRAConfig(rank=4, **lora))
    finally:
        assert all(parameter.requires_grad for parameter in model.parameters()), "the model was changed"
        assert not list(adapters(model))


def _life() -> None:
    model = _model(1)
    ids = torch.arange(8)[None]
    plain = model(ids, ids, None)
    names = set(model.state_dict())
    apply_lora(model, LoRAConfig(rank=4))
    assert torch.equal(model(ids, ids, None), plain), "B is zero at first"
    assert names < set(model.state_dict()), "the base keeps its names"
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all(name.rpartition(".")[0].endswith(".lora") for name in trainable)
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        apply_lora(model, LoRAConfig(rank=4))
    for _, adapter in adapters(model):
        nn.init.normal_(adapter.b)
    assert not torch.equal(model(ids, ids, None), plain)
    remove_lora(model)
    assert torch.equal(model(ids, ids, None), plain)
    assert set(model.state_dict()) == names


def test_apply_and_remove(workers: WorkerPool) -> None:
    workers(1, _life)


def _modes_by_situation() -> dict[str, str]:
    from megatron.core.tensor_parallel import random

    model = _model(2)
    apply_lora(model, LoRAConfig(rank=4, sequence_mode="regather"))
    adapter = next(a for _, a in adapters(model) if a.site.leaf == "linear_qkv")
    seen = {"training": adapter.current_placement().mode}
    with torch.no_grad():
        seen["no_grad"] = adapter.current_placement().mode
    model.eval()
    seen["eval"] = adapter.current_placement().mode
    model.train()
    random._set_checkpointing()
    seen["checkpointing"] = adapter.current_placement().mode
    random._unset_checkpointing()
    adapter.a.requires_grad_(False)
    seen["A frozen"] = adapter.current_placement().mode
    return seen


def test_regather_only_where_a_backward_follows(workers: WorkerPool) -> None:
    seen = workers(2, _modes_by_situation)[0]
    assert seen.pop("training") == "regather"
    assert set(seen.values()) == {"gather"}


def _silent_adapters(recompute: dict[str, Any], through_strategy: bool) -> None:
    """Without the package's hook on the embedding, block recompute leaves the first layer without gradients."""
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy.gradients import GradientReducer
    from lightning_mcore_lora.strategy.precision import Masters

    model = _model(1, **recompute)
    apply_lora(model, LoRAConfig(rank=4))
    model.embedding._forward_hooks.clear()
    ids = torch.arange(8)[None]
    if not through_strategy:
        model(ids, ids, None, labels=ids).mean().backward()
        check_gradients(model)
    reducer = GradientReducer(model, ParallelContext(ParallelSizes(1)), Masters())
    try:
        reducer.finalize()  # a step without a microbatch on this rank
        reducer.clear()
        reducer.before_backward(model(ids, ids, None, labels=ids).mean(), None).backward()
        reducer.after_backward()
        reducer.finalize()
    finally:
        reducer.close()


@pytest.mark.parametrize("through_strategy", [False, True])
def test_an_adapter_without_a_gradient_is_named(workers: WorkerPool, through_strategy: bool) -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    with pytest.raises(WorkerError, match=r"4 adapter\(s\) got no gradient.*'decoder.layers.0.self_attention.linear"):
        workers(1, _silent_adapters, block, through_strategy)


def test_a_model_without_linears_is_explained() -> None:
    with pytest.raises(ValueError, match="configure_model"):
        apply_lora(nn.LayerNorm(2), LoRAConfig())


def test_docs_show_the_table() -> None:
    """Each row of the placement table stands in docs/adapters.md; row-parallel ones, equal in every mode, once."""
    table = DOCS.read_text().partition("\n| linear |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = set()
    for line in table:
        linear, sequence, mode, a, b, _, kept, wide = re.split(r"\s*\|\s*", line)[1:-1]
        modes = ("gather", "regather", "local") if mode == "any" else (mode.strip("`"),)
        for each in modes:
            row = lookup(linear.partition(" ")[0], sequence.startswith("sharded"), each)
            assert a == row.a.value + (", gradient summed" if row.sum_a else "")
            assert b == row.b.value + (", gradient summed" if row.sum_b else "")
            assert kept == row.sees.value
            assert int(wide.partition(":")[0]) == row.wide
            shown.add(row)
    assert shown == set(TABLE)
