"""Adapters: settings, fall-backs, report, life in a model."""

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
    remove_lora,
)
from lightning_mcore_lora.adapters import SiteReport, adapters
from lightning_mcore_lora.adapters.cost import Cost
from lightning_mcore_lora.adapters.placement import TABLE, Around, Factor, lookup
from lightning_mcore_lora.adapters.report import TRAINED
from tests.mcore_runs import model_at
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
    keys = [(row.kind, row.around, row.mode) for row in TABLE]
    assert len(set(keys)) == len(keys)
    for row in TABLE:
        assert lookup(row.kind, row.around, row.mode) is row
        # A replicated factor's gradient is summed where, and only where, its ranks have a part of it each.
        assert not row.sum_a or (row.a is Factor.REPLICATED and row.around is not Around.WHOLE)
        assert not row.sum_b or (row.b is Factor.REPLICATED and row.around is not Around.WHOLE)
    with pytest.raises(KeyError, match="no placement for kind='diagonal'"):
        lookup("diagonal", Around.SEQUENCE, "local")


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
    return model_at(tp, sequence, **config)[0]


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


AROUND = {"sharded (SP)": Around.SEQUENCE, "whole": Around.WHOLE, "collectives removed": Around.REMOVED}


def test_docs_show_the_table() -> None:
    """Each row of the placement table stands in docs/adapters.md; row-parallel ones, equal in every mode, once."""
    table = DOCS.read_text().partition("\n| linear |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = set()
    for line in table:
        linear, around, mode, a, b, _, kept, wide = re.split(r"\s*\|\s*", line)[1:-1]
        modes = ("gather", "regather", "local") if mode == "any" else (mode.strip("`"),)
        for each in modes:
            row = lookup(linear.partition(" ")[0], AROUND[around], each)
            assert a == row.a.value + (", gradient summed" if row.sum_a else "")
            assert b == row.b.value + (", gradient summed" if row.sum_b else "")
            assert kept == row.sees.value
            assert int(wide.partition(":")[0]) == row.wide
            shown.add(row)
    assert shown == set(TABLE)
