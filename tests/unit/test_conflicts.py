"""Every row of the table of conflicts: where it holds, where it just does not, and where it is told."""

import os
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mcore_lora.adapters.cost import Cost
from lightning_mcore_lora.adapters.report import SiteReport
from lightning_mcore_lora.cli import main
from lightning_mcore_lora.memory.allocator import VARIABLES, Running, parse_settings, running, variable_read
from lightning_mcore_lora.memory.conflicts import CONFLICTS, find_conflicts
from lightning_mcore_lora.memory.situation import Situation
from lightning_mcore_lora.parallel import ParallelSizes
from lightning_mcore_lora.strategy.environment import cuda_defaults

DOCS = Path(__file__).parents[2] / "docs/conflicts.md"
CUDA, BOTH = VARIABLES
ON = {CUDA: "expandable_segments:True"}
HOOK = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
ONE, TP2 = ParallelSizes(1), ParallelSizes(2, 2, True, 1, 2)
HOPPER, BLACKWELL = (9, 0), (10, 0)
GATHERED = SiteReport("qkv", mode="gather", cost=Cost(kept_per_token=3.0 * 2**17, gathered_per_token=2.0 * 2**17))
LOCAL = SiteReport("qkv", mode="local", cost=Cost(kept_per_token=2.0**17))
FELL = SiteReport("fc1", mode="gather", reason="CUDA graphs are on")


def of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


GRAPHS = of(cuda_graph_impl="local")
#: Row, a situation where it holds, what is said of it, and situations beside it where it does not.
CASES: list[tuple[str, dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        "expandable segments unset",
        {"environ": {CUDA: "max_split_size_mb:512"}},
        "PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:512'",
        [
            {"environ": ON},
            {"environ": {CUDA: "garbage_collection_threshold:0.8, expandable_segments:True,max_split_size_mb:512"}},
            {"environ": {BOTH: "expandable_segments:True"}},
            {"cuda": False},
            {"environ": {CUDA: "expandable_segments:False"}},  # by choice
            {"environ": {CUDA: "backend:cudaMallocAsync"}},
            {"environ": HOOK, "torch_version": (2, 10)},  # they would not fit
            {"config": GRAPHS},
            {"running": Running(True, {"expandable_segments": "True"})},
        ],
    ),
    (
        "expandable segments unset",
        {"environ": {CUDA: "backend:native"}},
        "backend:native",
        [],
    ),
    (
        "expandable segments unset",
        {"environ": HOOK},
        "no variable sets them",
        [{"environ": HOOK, "torch_version": (2, 10)}],
    ),
    (
        "allocator settings set too late",
        {"environ": ON, "running": Running(False, {})},
        "expandable_segments is False, not True",
        [
            {"environ": ON},
            {"environ": ON, "running": Running(True, {"expandable_segments": "True"})},
            {"environ": ON, "running": Running(True, None)},
            {"running": Running(False, {})},
            {"running": Running(True, {"expandable_segments": "True"})},  # set by a call
        ],
    ),
    (
        "allocator settings set too late",
        {"environ": {CUDA: "max_split_size_mb:64"}, "running": Running(False, {"max_split_size_mb": "128"})},
        "max_split_size_mb is 128, not 64",
        [{"environ": {CUDA: "max_split_size_mb:64"}, "running": Running(False, {"max_split_size_mb": "64"})}],
    ),
    (
        "allocator settings set too late",
        {"environ": {CUDA: "max_split_size_mb:64"}, "running": Running(False, {})},
        "max_split_size_mb is unset, not 64",
        [],
    ),
    (
        "both allocator variables",
        {"environ": {CUDA: "", BOTH: "expandable_segments:True"}},
        "PYTORCH_CUDA_ALLOC_CONF='', PYTORCH_ALLOC_CONF='expandable_segments:True'",
        [{"environ": ON}, {"environ": {**ON, BOTH: "expandable_segments: True"}}, {"cuda": False}],
    ),
    (
        "allocator variable not read",
        {"environ": {BOTH: "expandable_segments:True"}, "torch_version": (2, 10)},
        "PYTORCH_ALLOC_CONF='expandable_segments:True'",
        [
            {"environ": {BOTH: "expandable_segments:True"}, "torch_version": (2, 11)},
            {"environ": {**ON, BOTH: ""}, "torch_version": (2, 10)},
        ],
    ),
    (
        "NCCL user buffers and expandable segments",
        {"environ": ON | HOOK, "torch_version": (2, 10)},
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 with expandable_segments:True",
        [
            {"environ": ON | HOOK, "torch_version": (2, 11)},
            {"environ": HOOK, "torch_version": (2, 10)},
            {"environ": ON, "torch_version": (2, 10)},
            {"environ": ON | HOOK, "torch_version": (2, 10), "running": Running(False, {})},
        ],
    ),
    (
        "NCCL user buffers and expandable segments",
        {"environ": {CUDA: "a:1,expandable_segments:True"}, "ddp": of(nccl_ub=True), "torch_version": (2, 10)},
        "nccl_ub=True with",
        [{"environ": ON, "ddp": of(nccl_ub=False), "torch_version": (2, 10)}],
    ),
    (
        "nccl_ub refused by name",
        {"environ": {CUDA: "max_split_size_mb:64,expandable_segments:True"}, "ddp": of(nccl_ub=True)},
        "PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64,expandable_segments:True'",
        [
            {"environ": {CUDA: "expandable_segments: True"}, "ddp": of(nccl_ub=True)},  # another word
            {"environ": {BOTH: "expandable_segments:True"}, "ddp": of(nccl_ub=True)},
            {"environ": ON | HOOK},
            {"environ": ON, "ddp": of(nccl_ub=True), "torch_version": (2, 10)},  # the row above
        ],
    ),
    (
        "Megatron-Core's CUDA graphs and expandable segments",
        {"environ": ON, "config": GRAPHS, "capability": HOPPER},
        "expandable_segments:True, NCCL_GRAPH_REGISTER=unset",
        [
            {"environ": {**ON, "NCCL_GRAPH_REGISTER": "0"}, "config": GRAPHS, "capability": HOPPER},
            {"config": GRAPHS, "capability": HOPPER},
            {"environ": ON, "config": GRAPHS, "capability": BLACKWELL},
            {"environ": ON, "config": of(cuda_graph_impl="transformer_engine"), "capability": HOPPER},  # the row above
            {"environ": ON, "config": of(cuda_graph_impl="none"), "capability": HOPPER},
        ],
    ),
    (
        "Transformer Engine's CUDA graphs and expandable segments",
        {
            "environ": {**ON, "NCCL_GRAPH_REGISTER": "1"},
            "config": of(cuda_graph_impl="transformer_engine"),
            "capability": BLACKWELL,
        },
        "NCCL_GRAPH_REGISTER=1",
        [{"environ": ON, "config": config, "capability": BLACKWELL} for config in (of(), GRAPHS)],
    ),
    (
        "memory pools and expandable segments",
        {"running": Running(True, {}, user_pools=2), "torch_version": (2, 10)},
        "2 pool(s)",
        [
            {"running": Running(True, {}, user_pools=2)},
            {"running": Running(False, {}, user_pools=2), "torch_version": (2, 10)},
            {"running": Running(True, {}), "torch_version": (2, 10)},
        ],
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS for tensor parallelism",
        {"sizes": TP2, "capability": HOPPER, "environ": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}},
        "CUDA_DEVICE_MAX_CONNECTIONS=8 at tensor_parallel_size=2",
        [
            {"sizes": TP2, "capability": HOPPER, "environ": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
            {"sizes": TP2, "capability": BLACKWELL},
            {"sizes": ONE, "capability": HOPPER},
            {"sizes": TP2},
            {"sizes": TP2, "capability": HOPPER, "fsdp": True},
        ],
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS for FSDP",
        {"fsdp": True, "environ": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        [{"fsdp": True}, {"environ": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}],
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS on Blackwell",
        {"capability": BLACKWELL, "environ": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        [{"capability": HOPPER, "environ": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, {"capability": BLACKWELL}],
    ),
    (
        "CPU offloading with pipeline parallelism",
        {"config": of(cpu_offloading=True, pipeline_model_parallel_size=2)},
        "pipeline_model_parallel_size=2",
        [{"config": of(cpu_offloading=True, pipeline_model_parallel_size=1)}],
    ),
    (
        "CPU offloading with recompute",
        {"config": of(cpu_offloading=True, recompute_granularity="selective"), "cuda": False},
        "recompute_granularity='selective'",
        [{"config": of(cpu_offloading=True)}, {"config": of(recompute_granularity="full")}],
    ),
    (
        "gathered inputs kept",
        {"sites": [GATHERED, GATHERED, LOCAL], "sizes": TP2, "tokens": 4096},
        "2 site(s) keep 2 GiB more than their shard for a microbatch of 4,096 tokens",
        [{"sites": [LOCAL], "sizes": TP2}],
    ),
    (
        "gathered inputs kept",
        {"sites": [GATHERED], "sizes": TP2},
        "1 site(s) keep 2 GiB more than their shard for each 8,192 tokens of a microbatch",
        [],
    ),
    (
        "adapters that fell back",
        {"sites": [LOCAL, FELL]},
        "1 site(s), fc1 first: CUDA graphs are on",
        [{"sites": [LOCAL]}, {"sites": [SiteReport("fc1", reason="not adapted at all")]}],
    ),
    (
        "distributed optimizer on one replica",
        {"ddp": of(use_distributed_optimizer=True), "sizes": TP2},
        "use_distributed_optimizer=True on 1 replica",
        [{"ddp": of(use_distributed_optimizer=True), "sizes": ParallelSizes(2)}, {"sizes": TP2}],
    ),
    (
        "overlap_param_gather without its conditions",
        {"ddp": of(overlap_param_gather=True, use_distributed_optimizer=True, overlap_grad_reduce=False)},
        "overlap_param_gather=True with overlap_grad_reduce=False",
        [
            {"ddp": of(overlap_param_gather=True, use_distributed_optimizer=True, overlap_grad_reduce=True)},
            {"ddp": of(overlap_grad_reduce=True)},
        ],
    ),
]


def names(**fields: Any) -> list[str]:
    return [conflict.row.name for conflict in find_conflicts(Situation(**fields))]


@pytest.mark.parametrize(("name", "fields", "detail", "others"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_row(name: str, fields: dict[str, Any], detail: str, others: list[dict[str, Any]]) -> None:
    found = [conflict for conflict in find_conflicts(Situation(**fields)) if conflict.row.name == name]
    assert len(found) == 1
    assert detail in found[0].detail
    assert found[0].row.fix in str(found[0])
    for other in others:
        assert name not in names(**other), other


def test_every_row_has_a_case() -> None:
    assert {case[0] for case in CASES} == {row.name for row in CONFLICTS}
    assert {row.severity for row in CONFLICTS} == {"error", "warning", "advice"}


def test_docs_show_the_table() -> None:
    lines = re.findall(r"^\| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    shown = [tuple(line.split(" | ")) for line in lines if not line.startswith(("---", "what | "))]
    rows = [(r.name, r.severity, r.versions, r.cause, r.confirm, r.fix) for r in CONFLICTS]
    assert shown == rows


@pytest.mark.parametrize(
    ("config", "maker"),
    [
        (of(), "none"),
        (of(cuda_graph_impl="none"), "none"),
        (of(cuda_graph_impl="local"), "local"),
        (of(cuda_graph_impl="transformer_engine"), "transformer_engine"),
        (of(enable_cuda_graph=True, external_cuda_graph=False), "local"),
        (of(enable_cuda_graph=False, external_cuda_graph=True), "transformer_engine"),
    ],
)
def test_who_makes_graphs(config: SimpleNamespace, maker: str) -> None:
    assert Situation(config=config).cuda_graphs == maker


# -- what the allocator was told -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        ("a:1, expandable_segments: True ,b:2", {"a": "1", "expandable_segments": "True", "b": "2"}),
        (
            "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False",
            {"roundup_power2_divisions": "[256:1,512:2,>:4]", "expandable_segments": "False"},
        ),
        ("a:1,a:2,", {"a": "2"}),
    ],
)
def test_settings_are_read_in_any_order(text: str, options: dict[str, str]) -> None:
    assert parse_settings(text) == options


def test_the_variable_that_counts() -> None:
    assert variable_read({BOTH: "x:1"}, (2, 11)) == BOTH
    assert variable_read({BOTH: "x:1"}, (2, 9)) is None
    assert variable_read({BOTH: "x:1", CUDA: ""}, (2, 13)) == CUDA


def test_what_the_allocator_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert running() is None
    snapshot: dict[str, Any] = {
        "allocator_settings": {
            "expandable_segments": True,
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
        },
        # The pool of all, twice; a captured graph's; and two that users made.
        "segments": [{"segment_pool_id": pool} for pool in ((0, 0), (0, 0), (1, 0), (0, 1), (0, 2), (0, 2))],
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    assert running() == Running(True, {"max_split_size_mb": "64", "expandable_segments": "True"}, 2)
    del snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    assert running() == Running(True, None, 2)
    del snapshot["allocator_settings"]["expandable_segments"]
    assert running() is None, "this torch does not say"

    def refuse() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)
    assert running() is None


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("installed", ["2.10.0", "2.13.0+cu130"])
@pytest.mark.parametrize("environ", [{}, HOOK, {"NCCL_GRAPH_REGISTER": "1"}, {"NCCL_GRAPH_REGISTER": "0"}, {CUDA: ""}])
def test_defaults_do_not_conflict(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], installed: str, graphs: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", installed)
    after = environ | cuda_defaults(environ, 2)
    assert environ.items() <= after.items(), "what the user set stays"
    number = tuple(int(part) for part in installed.split(".")[:2])
    config = GRAPHS if graphs else None
    found = find_conflicts(
        Situation(environ=after, torch_version=number, config=config, sizes=TP2, capability=HOPPER)  # type: ignore[arg-type]
    )
    assert [c.row.name for c in found if c.row.severity == "error"] == []
    assert "CUDA_DEVICE_MAX_CONNECTIONS for tensor parallelism" not in [c.row.name for c in found]
    if environ in ({}, {"NCCL_GRAPH_REGISTER": "0"}):
        assert after[CUDA] == "expandable_segments:True"


# -- the doctor ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (CUDA, BOTH, "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER", *HOOK):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_doctor(clean: pytest.MonkeyPatch, tiny_llama: Path, capsys: pytest.CaptureFixture) -> None:
    main(["doctor"])
    said = capsys.readouterr().out
    assert "Nothing found that does not fit, for TP=1, EP=1 on the CPU (" in said
    assert "Not looked at, for the model is not known: adapters, batch (--model)" in said
    main(["doctor", "--accelerator", "cuda", "--model", str(tiny_llama)])
    assert "Not looked at, for the device is not known: CUDA_DEVICE_MAX_CONNECTIONS" in capsys.readouterr().out
    documented = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)[0].replace("model-dir", str(tiny_llama))
    arguments = [*shlex.split(documented)[1:], "--accelerator", "cuda"]
    main([*arguments, "--capability", "9.0", "--lora.sequence_mode", "gather", "--lora.rank", "4"])
    said = capsys.readouterr().out
    for name in ("expandable segments unset", "CUDA_DEVICE_MAX_CONNECTIONS for", "gathered inputs kept"):
        assert name in re.sub(r"\s+", " ", said)
    assert version("torch") in said
    clean.setattr(os, "environ", {**os.environ, **ON, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    main([*arguments, "--capability", "9.0"])
    said = capsys.readouterr().out
    assert "Nothing found that does not fit" in said
    assert "Not looked at" not in said


def test_doctor_fails_where_the_run_would(
    clean: pytest.MonkeyPatch, tiny_llama: Path, capsys: pytest.CaptureFixture
) -> None:
    overrides = '{"cpu_offloading": true, "cpu_offloading_num_layers": 1, "recompute_granularity": "selective"}'
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--model", str(tiny_llama), "--overrides", overrides])
    assert stopped.value.code == 1
    assert "CPU offloading with recompute" in re.sub(r"\s+", " ", capsys.readouterr().out)
    clean.setenv(CUDA, "expandable_segments:True")
    main(["doctor", "--accelerator", "cuda", "--ddp", '{"nccl_ub": true}'])  # Megatron-Core may take it
    assert "nccl_ub refused by name" in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--accelerator", "gpu"), "accelerator='gpu' must be 'cuda' or 'cpu'"),
        (("--ddp", '{"nccl_bu": true}'), r"'nccl_bu' is no field of DistributedDataParallelConfig; near .*'nccl_ub'"),
        (("--overrides", '{"cpu_ofloading": true}'), r"'cpu_ofloading' is no field of TransformerConfig; near"),
        (("--sequence_length", "0"), "sequence_length=0 must be a positive integer"),
        (("--micro_batch_size", "-3"), "micro_batch_size=-3 must be a positive integer"),
        (("--capability", "-1"), r"capability=-1.0 must be positive, for example 9.0"),
        (("--devices", "-2"), "world_size=-2 must be a positive integer"),
        (("--overrides", '{"sequence_parallel": true}'), "sequence_parallel follows the layout"),
        (("--model", "nowhere"), r"nowhere/config.json not found"),
        (("--tensor_parallel_size", "2", "--devices", "3"), "world_size=3 is not divisible by tensor_parallel_size=2"),
    ],
)
def test_doctor_names_bad_settings(arguments: tuple[str, ...], names: str) -> None:
    with pytest.raises(SystemExit, match=names):
        main(["doctor", *arguments])
