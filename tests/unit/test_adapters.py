"""Adapters: settings, targets, fall-backs, report."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mcore_lora import LoRAConfig, LoRAReport, LoRASPCallback, apply_lora, remove_lora
from lightning_mcore_lora.adapters import SiteReport, adapters
from lightning_mcore_lora.adapters.cost import Cost
from lightning_mcore_lora.adapters.placement import TABLE, Factor, lookup
from lightning_mcore_lora.adapters.report import TRAINED
from tests.workers import WorkerError, WorkerPool

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rank": 0}, "rank=0 must be a positive integer"),
        ({"rank": 1.5}, "rank=1.5 must be a positive integer"),
        ({"alpha": -1}, "alpha=-1 must be positive"),
        ({"sequence_mode": "best"}, "sequence_mode='best' must be one of"),
        ({"target_modules": "linear_qkv"}, "must be a list of names"),
        ({"target_modules": []}, "target_modules is empty"),
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


@pytest.mark.parametrize(
    ("tp", "lora", "match"),
    [
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


def _train_with(recompute: dict[str, Any], mode: str) -> dict[str, torch.Tensor]:
    model = _model(2, **recompute)
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from tests.mcore_runs import _fill_by_name

    _fill_by_name(model, ParallelContext(ParallelSizes(2, 2, True, 1, 2)))
    apply_lora(model, LoRAConfig(rank=4, sequence_mode=mode))
    generator = torch.Generator().manual_seed(9)
    for _, adapter in adapters(model):
        site = adapter.site
        adapter.load_full(
            torch.randn(4, site.d_in, generator=generator), torch.randn(site.d_out, 4, generator=generator)
        )
    ids = torch.arange(8)[None]
    model(ids, ids, None, labels=ids).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("mode", ["gather", "regather", "local"])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=["full", "mlp", "core_attn"],
)
def test_recompute_reaches_adapters_over_a_frozen_embedding(
    workers: WorkerPool, recompute: dict[str, Any], mode: str
) -> None:
    plain, again = workers(2, _train_with, {}, mode), workers(2, _train_with, recompute, mode)
    for one, other in zip(plain, again, strict=True):
        for name, gradient in one.items():
            assert other[name] is not None, f"{name} got no gradient"
            assert torch.equal(gradient, other[name]), name


def test_a_model_without_linears_is_explained() -> None:
    with pytest.raises(ValueError, match="configure_model"):
        apply_lora(nn.LayerNorm(2), LoRAConfig())


def test_docs_show_the_table() -> None:
    """Each row of the placement table stands in docs/adapters.md; row-parallel ones, equal in every mode, once."""
    lines = [re.split(r"\s*\|\s*", line)[1:-1] for line in DOCS.read_text().splitlines() if line.startswith("| ")][1:]
    shown = set()
    for linear, sequence, mode, a, b, _, _, wide in lines:
        modes = ("gather", "regather", "local") if mode == "any" else (mode.strip("`"),)
        for each in modes:
            row = lookup(linear.partition(" ")[0], sequence.startswith("sharded"), each)
            assert a == row.a.value + (", gradient summed" if row.sum_a else "")
            assert b == row.b.value + (", gradient summed" if row.sum_b else "")
            assert int(wide.partition(":")[0]) == row.wide
            shown.add(row)
    assert shown == set(TABLE)
