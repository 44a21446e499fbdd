"""A run that is saved at one layout goes on at any other as if it had never stopped."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import families, peft_runs, reshard_runs
from tests.moe import Model
from tests.oracle import relative_error
from tests.reshard_runs import STEPS, STOP, Job, Layout
from tests.workers import WorkerPool

MOMENTS = 2  # their bound in that of the weights: the second are of squares

DENSE = {
    "lora": Job(),
    "regather": Job({"sequence_mode": "regather", "rank": 6}),
    "dora": Job({"dora": True, "modules_to_save": ["final_layernorm", "output_layer"]}),
    "canonical": Job({"canonical": True}),
    "bfloat16": Job({"dtype": "bfloat16"}, bound=None),
    "bf16-true": Job(None, precision="bf16-true", bound=None),
    "accumulate": Job(accumulate=2),
    "full": Job(None, {"perform_initialization": False}),  # where Megatron-Core initialises nothing, it marks nothing
}
MIXTURE = {
    "dora": Job({"dora": True}),
    "shared": Job({"expert_adapters": "shared"}),
    "shared_outer": Job({"expert_adapters": "shared_outer", "dora": True}),
    "full": Job(None),
}
DENSE_PAIRS = [
    (Layout(2, 2), Layout(1, 1)),
    (Layout(1, 1), Layout(2, 2)),
    (Layout(2, 2), Layout(3, 3)),
    (Layout(3, 3), Layout(2, 4)),
    (Layout(2, 4), Layout(2, 2)),
    (Layout(1, 1), Layout(1, 2)),
    (Layout(1, 4), Layout(1, 2)),
]
MIXTURE_PAIRS = [
    (Layout(1, 2, 2), Layout(1, 1)),
    (Layout(1, 1), Layout(1, 4, 4)),
    (Layout(2, 2, 1, 2), Layout(2, 2, 1, 1)),
    (Layout(2, 4, 2, 2), Layout(2, 2, 2, 1)),
    (Layout(2, 4, 2, 1), Layout(2, 4, 2, 2)),
    (Layout(1, 2, 1, 2), Layout(1, 2, 2, 1)),
]
QUICK = {
    ("dense", "lora", 0),
    ("dense", "regather", 2),
    ("dense", "dora", 1),
    ("dense", "canonical", 3),
    ("dense", "accumulate", 4),
    ("dense", "full", 0),
    ("mixture", "dora", 0),
    ("mixture", "shared", 1),
    ("mixture", "shared_outer", 3),
    ("mixture", "full", 2),
}
CASES = [
    pytest.param(
        kind,
        name,
        *pair,
        id=f"{kind}-{name}-{pair[0]}-{pair[1]}",
        marks=[] if (kind, name, i) in QUICK else pytest.mark.full,
    )
    for kind, jobs, pairs in (("dense", DENSE, DENSE_PAIRS), ("mixture", MIXTURE, MIXTURE_PAIRS))
    for name in jobs
    for i, pair in enumerate(pairs)
    if not (name == "accumulate" and pair[0].world // pair[0].tp == 4)  # the batch is too small
]


@pytest.fixture(scope="module")
def directory(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a model."""

    @cache
    def of(kind: str) -> str:
        return str(tiny_llama if kind == "dense" else Model(shared=True).write(tmp_path_factory.mktemp("moe")))

    return of


@pytest.fixture(scope="module")
def straight(workers: WorkerPool, directory: Any) -> Any:
    """A run that is not stopped."""

    @cache
    def run(kind: str, name: str) -> list[dict[str, Any]]:
        job = (DENSE if kind == "dense" else MIXTURE)[name]
        return workers(1, reshard_runs.fit, directory(kind), Layout(), job, STEPS)

    return run


@pytest.fixture(scope="module")
def stopped(workers: WorkerPool, directory: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that stops in the middle of an epoch, and where it was saved."""

    @cache
    def run(kind: str, name: str, layout: Layout) -> tuple[list[dict[str, Any]], str]:
        out = str(tmp_path_factory.mktemp("saved") / "stopped.ckpt")
        job = (DENSE if kind == "dense" else MIXTURE)[name]
        return workers(layout.world, reshard_runs.fit, directory(kind), layout, job, STOP, out), out

    return run


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(("kind", "name", "before", "after"), CASES)
def test_goes_on_at_another_layout(
    workers: WorkerPool,
    directory: Any,
    straight: Any,
    stopped: Any,
    kind: str,
    name: str,
    before: Layout,
    after: Layout,
) -> None:
    job = (DENSE if kind == "dense" else MIXTURE)[name]
    first, out = stopped(kind, name, before)
    rest = workers(after.world, reshard_runs.fit, directory(kind), after, job, STEPS, None, out)

    # What was loaded is what was saved, to the bit: weights, moments, numbers.
    assert_equal(
        reshard_runs.whole([rank["ended"] for rank in first]), reshard_runs.whole([rank["began"] for rank in rest])
    )
    for rank in rest:
        assert rank["began"]["numbers"] == first[0]["ended"]["numbers"]

    # And it ends where a run ends that was not stopped, having seen the same samples in the same steps.
    uninterrupted = straight(kind, name)
    samples = reshard_runs.seen(first, job.accumulate) + reshard_runs.seen(rest, job.accumulate)
    assert samples == reshard_runs.seen(uninterrupted, job.accumulate)
    for rank in rest:
        assert rank["ended"]["numbers"] == uninterrupted[0]["ended"]["numbers"]
    if job.bound is None:
        return
    expected = reshard_runs.whole([rank["ended"] for rank in uninterrupted])
    got = reshard_runs.whole([rank["ended"] for rank in rest])
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        error = relative_error(got[key], value)
        assert error < job.bound * (MOMENTS if ":" in key else 1), (key, error)


DROPOUT = Job(
    {"dropout": 0.1, "modules_to_save": ["final_layernorm"]}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}
)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", Layout(2, 2)),
        pytest.param("dense", Layout(1, 2), marks=pytest.mark.full),
        ("mixture", Layout(2, 2, 2, 1)),
        pytest.param("mixture", Layout(1, 2, 1, 2), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [2, pytest.param(5, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)])
def test_goes_on_to_the_bit_at_the_same_layout(
    workers: WorkerPool, directory: Any, tmp_path: Path, kind: str, layout: Layout, stop: int
) -> None:
    # Stopped by max_steps in the middle of an epoch, at its end, and in the middle of the next.
    out = str(tmp_path / "stopped.ckpt")
    train = (reshard_runs.fit, directory(kind), layout, DROPOUT)
    straight = workers(layout.world, *train, STEPS)
    first = workers(layout.world, *train, stop, out)
    rest = workers(layout.world, *train, STEPS, None, out)
    for rank, (one, begin, end) in enumerate(zip(straight, first, rest, strict=True)):
        assert begin["losses"] + end["losses"] == one["losses"], rank
        assert begin["seen"] + end["seen"] == one["seen"]
        assert_equal(one["ended"]["tensors"], end["ended"]["tensors"])
        assert one["ended"]["numbers"] == end["ended"]["numbers"]


def test_masks_of_what_is_replicated_go_on_at_another_layout(
    workers: WorkerPool, directory: Any, tmp_path: Path
) -> None:
    job = Job(
        {"dropout": 0.2, "target_modules": ["linear_qkv", "linear_fc1"]},
        {"hidden_dropout": 0.2, "attention_dropout": 0.0},
        {"sequence_parallel": False},
    )
    out = str(tmp_path / "stopped.ckpt")
    straight = workers(1, reshard_runs.fit, directory("dense"), Layout(), job, STEPS)
    workers(2, reshard_runs.fit, directory("dense"), Layout(2, 2), job, STOP, out)
    rest = workers(1, reshard_runs.fit, directory("dense"), Layout(), job, STEPS, None, out)
    assert rest[0]["losses"] == pytest.approx(straight[0]["losses"][STOP:], rel=1e-5)
    expected = reshard_runs.whole([straight[0]["ended"]])
    for key, value in reshard_runs.whole([rest[0]["ended"]]).items():
        assert relative_error(value, expected[key]) < job.bound * (MOMENTS if ":" in key else 1), key


def test_shards_draw_anew_at_another_layout(workers: WorkerPool, directory: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "stopped.ckpt")
    workers(2, reshard_runs.fit, directory("dense"), Layout(2, 2), DROPOUT, STOP, out)
    twice = [
        workers(4, reshard_runs.fit, directory("dense"), Layout(2, 4), DROPOUT, STOP + 1, None, out) for _ in range(2)
    ]
    for one, other in zip(*twice, strict=True):
        assert one["losses"] == other["losses"], "what is drawn anew depends on the checkpoint alone"
    replicas = {rank["ended"]["ranks"]["dp"]: rank["losses"] for rank in twice[0]}
    assert replicas[0] != replicas[1]


def test_a_whole_checkpoint_needs_no_other_weights(workers: WorkerPool, directory: Any, tmp_path: Path) -> None:
    job = Job({"dora": True}, strategy={"save_base_weights": True})
    out = str(tmp_path / "stopped.ckpt")
    workers(2, reshard_runs.fit, directory("mixture"), Layout(1, 2, 2), job, STOP, out)
    alone = workers(2, reshard_runs.fit, directory("mixture"), Layout(2, 2, 1, 2), job, STEPS, None, out, False)
    straight = workers(2, reshard_runs.fit, directory("mixture"), Layout(2, 2, 1, 2), job, STEPS)
    assert alone[0]["losses"] == pytest.approx(straight[0]["losses"][STOP:], rel=1e-5)


VOCABULARY = {
    "in full": {"target_modules": ("linear_qkv",), "modules_to_save": ("word_embeddings", "output_layer")},
    "adapter": {"target_modules": ("output_layer",)},
}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("what", ["in full", pytest.param("adapter", marks=pytest.mark.full)])
def test_padded_vocabulary_goes_on_at_another_padding(
    workers: WorkerPool, tmp_path: Path, before: int, after: int, what: str
) -> None:
    """97 tokens: 98 rows at TP=2."""
    directory = families.write("llama", tmp_path / "base")

    def run(tp: int, checkpoint: str, **options: Any) -> Any:
        arguments = (str(directory), (tp, 1, tp), str(tmp_path / checkpoint), VOCABULARY[what], None)
        return workers(tp, peft_runs.fit, *arguments, max_epochs=2, **options)[0]

    run(before, "cut.ckpt", max_steps=4)
    logits = run(after, "on.ckpt", resume=str(tmp_path / "cut.ckpt"))
    assert relative_error(logits, run(before, "straight.ckpt")) < 1e-5


@pytest.mark.full
def test_padded_vocabulary_has_float32_masters(workers: WorkerPool, tmp_path: Path) -> None:
    """Their rows are those that were saved; steps in bfloat16 at two layouts cannot be compared."""
    directory, cut = families.write("llama", tmp_path / "base"), str(tmp_path / "cut.ckpt")
    lora, common = VOCABULARY["in full"], {"max_epochs": 2, "precision": "bf16-true"}
    workers(2, peft_runs.fit, str(directory), (2, 1, 2), cut, lora, None, max_steps=4, **common)
    logits = workers(1, peft_runs.fit, str(directory), (1, 1, 1), cut, lora, None, resume=cut, **common)[0]
    assert logits.isfinite().all()
