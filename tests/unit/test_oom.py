"""Explanations of an out-of-memory, from recorded statistics of the allocator, and the remedies they name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore_lora import LoRAConfig, MemoryEstimate, estimate_memory
from lightning_mcore_lora.memory import oom
from lightning_mcore_lora.memory.allocator import Running
from lightning_mcore_lora.memory.oom import GIB, Failure, bytes_asked, explain, failure_of, is_out_of_memory
from lightning_mcore_lora.memory.remedies import REMEDIES, savings
from lightning_mcore_lora.parallel import ParallelSizes
from tests.unit.test_memory_estimate import PUBLISHED

#: As torch 2.13 words it.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.80 GiB memory in use."
)
#: ``torch.cuda.memory_stats`` where pieces are free, and where tensors take it all.
FRAGMENTED = {"allocated_bytes.all.current": 61 * GIB, "reserved_bytes.all.current": 77 * GIB, "num_ooms": 1}
FULL = {"allocated_bytes.all.current": 76 * GIB, "reserved_bytes.all.current": 77 * GIB, "num_ooms": 1}
SIZES = ParallelSizes(4, 2, True, 1, 2)


def qwen3(**options: Any) -> MemoryEstimate:
    return estimate_memory(PUBLISHED["Qwen3-8B"], SIZES, **({"sequence_length": 8192, "micro_batch_size": 2} | options))


def recorded(
    monkeypatch: pytest.MonkeyPatch,
    stats: dict[str, int],
    expandable: bool,
    peaks: tuple[float, ...] = (),
    message: str = MESSAGE,
) -> Failure:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (round(1.25 * GIB), 79 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(oom.allocator, "running", lambda: Running(expandable, {}))
    return failure_of(torch.OutOfMemoryError(message), torch.device("cuda", 0), 3, peaks, 120)


def steps_of(text: str) -> list[str]:
    return re.findall(r"^  \d+\. (.*)$", text, re.MULTILINE)


def test_fragmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = recorded(monkeypatch, FRAGMENTED, expandable=False)
    assert (failure.asked, failure.idle, failure.is_fragmented) == (round(2.5 * GIB), 16 * GIB, True)
    text = explain(failure, qwen3())
    assert "rank 3" in text
    assert "Cause: fragmentation" in text
    assert "2.50 GiB more were asked for. This process holds 77.00 GiB of 79.00 GiB; 1.25 GiB are free; " in text
    assert "others, and this one outside torch, hold 0.75" in text
    assert "Tensors take 61.00 GiB; 16.00 GiB no tensor takes (fragmentation 21%)" in text
    assert steps_of(text)[0] == "add expandable_segments:True to PYTORCH_CUDA_ALLOC_CONF: up to 16.00 GiB, cost none"


def test_what_the_allocator_said_counts_more_than_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the explanation the failed operation's tensors are freed."""
    said = (
        MESSAGE
        + " Of the allocated memory 74.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    )
    failure = recorded(monkeypatch, FRAGMENTED, expandable=False, message=said + "unallocated.")
    assert (failure.allocated, failure.idle) == (round(74.5 * GIB), GIB // 2)
    assert not failure.is_fragmented
    assert "expandable_segments" not in explain(failure, None)


def test_segments_that_would_not_fit_are_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
    text = explain(recorded(monkeypatch, FRAGMENTED, expandable=False), None)
    assert "Cause: fragmentation" in text
    assert "expandable_segments" not in text


def test_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    text = explain(recorded(monkeypatch, FULL, expandable=True), qwen3())
    assert "Cause: capacity: more is needed" in text
    assert "expandable_segments" not in text, "they are on"
    estimate = qwen3()
    name, count = estimate.largest[0]
    assert (
        f"Estimated for 2 x 8,192 tokens: {estimate.total_gib:.2f} GiB; largest: {name} {count / GIB:.2f} GiB" in text
    )
    assert "Ranks at" not in text, "nothing was logged yet"


def test_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth that no tensor takes, and less than what was asked for: not the cause alone."""
    stats = {"allocated_bytes.all.current": 18 * GIB, "reserved_bytes.all.current": 20 * GIB}
    assert "Cause: capacity, and fragmentation" in explain(recorded(monkeypatch, stats, expandable=False), None, "none")


@pytest.mark.parametrize(("peaks", "uneven"), [((50.0, 51.0, 52.0, 76.0), True), ((75.0, 75.5, 75.0, 76.0), False)])
def test_imbalance_over_ranks(monkeypatch: pytest.MonkeyPatch, peaks: tuple[float, ...], uneven: bool) -> None:
    failure = recorded(monkeypatch, FULL, expandable=True, peaks=tuple(peak * GIB for peak in peaks))
    text = explain(failure, None, "the model has not run yet")
    assert f"Ranks at step 120: {min(peaks):.2f} to 76.00 GiB, the largest rank 3's" in text
    assert ("That is uneven" in text) is uneven
    assert "No estimate: the model has not run yet" in text
    assert "Ranks" not in explain(Failure(0, None, 80 * GIB, 0, 80 * GIB, peaks=(79.0 * GIB,)), None), "there is one"


def test_steps_are_in_order_with_gib_and_cost() -> None:
    estimate = qwen3(lora=LoRAConfig(rank=256, sequence_mode="gather"), precision="bf16-mixed", layers="local")
    found = list(savings(estimate))
    order = [saving.remedy for saving in found]
    assert order == [remedy for remedy in REMEDIES if remedy in order]
    said = [saving.step.text for saving in found]
    for start, text in zip(
        (
            "precision='bf16-true'",
            "Transformer Engine's layers",
            "sequence_mode='local'",
            "recompute_granularity='selective', recompute_modules=['core_attn']",
            "micro batch 1",
            "a distributed optimizer over 2 replicas",
            "recompute_granularity='selective', recompute_modules=['mlp']",
            "recompute_granularity='full'",
            "tensor_parallel_size=4",
            "pipeline parallelism",
        ),
        said,
        strict=True,
    ):
        assert text.startswith(start)
    # The field's measurements.
    costs = {saving.step.text.split(",")[0]: saving.remedy.cost for saving in found}
    assert costs["tensor_parallel_size=4"].startswith("28%")
    assert costs["pipeline parallelism (not with MCoreTP)"].startswith("6%")
    assert found[6].remedy.cost.startswith("16%")
    text = explain(Failure(0, None, 80 * GIB, 0, 80 * GIB, 80 * GIB, True), estimate)
    for saving, step in zip(found, steps_of(text), strict=True):
        assert step.endswith(f"cost {saving.remedy.cost}")
        size = "not estimated" if saving.saved is None else oom.said(saving.saved)
        assert f"{saving.step.text}: {size}, cost" in step
    assert (oom.said(3 * GIB // 2), oom.said(3 * 2**20)) == ("1.50 GiB", "3.00 MiB")


def test_savings_are_differences_of_estimates() -> None:
    gather = LoRAConfig(rank=256, sequence_mode="gather")
    estimate = qwen3(lora=gather)
    saved = {saving.step.text: saving.saved for saving in savings(estimate)}
    assert saved["sequence_mode='local'"] == estimate.total - qwen3(lora=LoRAConfig(rank=256)).total
    assert saved["micro batch 1, twice the accumulation"] == (
        estimate.total - qwen3(lora=gather, micro_batch_size=1).total
    )
    assert saved["tensor_parallel_size=4"] == (
        estimate.total - estimate.again(sizes=ParallelSizes(4, 4, True, 1, 4)).total
    )
    state = estimate.components["optimizer state"]  # its factors are float32 already
    optimizer = next(text for text in saved if text.startswith("a distributed optimizer"))
    assert saved[optimizer] == state // 2
    # What helps on a model of dense layers alone is not told of experts, and the other way round.
    experts = estimate_memory(PUBLISHED["Qwen3-30B-A3B"], ParallelSizes(4, 2, True, 2, 1), sequence_length=8192)
    texts = " ".join(saving.step.text for saving in savings(experts))
    split = experts.again(sizes=SIZES)  # ETP follows TP
    doubled = next(saving for saving in savings(split) if saving.step.text == "tensor_parallel_size=4")
    assert doubled.saved == split.total - split.again(sizes=ParallelSizes(4, 4, True, 1, 4)).total
    assert "'moe'" in texts
    assert "expert_parallel_size=4" in texts
    assert "'mlp'" not in texts
    assert "expert_parallel" not in " ".join(saved)


def _texts(estimate: MemoryEstimate) -> str:
    return "; ".join(saving.step.text for saving in savings(estimate, 0.0))


def test_steps_say_what_to_set() -> None:
    odd = qwen3(micro_batch_size=3)
    assert "micro batch 1, 3 times the accumulation" in _texts(odd)
    assert "micro batch 2, twice the accumulation" in _texts(qwen3(micro_batch_size=4))
    # Without recompute_modules Megatron-Core takes core_attn.
    assert "recompute_modules=['core_attn', 'mlp']" in _texts(qwen3(recompute_granularity="selective"))
    mixture = estimate_memory(PUBLISHED["Qwen3-30B-A3B"], ParallelSizes(8, 2, True, 4, 2), sequence_length=4096)
    assert "tensor_parallel_size=4 (needs 16 processes)" in _texts(mixture)
    assert "expert_parallel_size=8 (needs 16 processes)" in _texts(mixture)
    assert "needs" not in _texts(mixture.again(sizes=ParallelSizes(16, 2, True, 4, 2)))


def test_a_distributed_optimizer_splits_over_replicas() -> None:
    """Experts have fewer replicas than what is dense: here none."""
    estimate = estimate_memory(PUBLISHED["Qwen3-30B-A3B"], ParallelSizes(8, 1, False, 8, 1), sequence_length=4096)
    saved = next(saving.saved for saving in savings(estimate, 0.0) if "distributed" in saving.step.text)
    dense = 48 * 16 * (2048 + 4096 + 1024 + 4096 + 2048)
    assert saved == pytest.approx(8 * dense * 7 / 8, rel=1e-9)


def test_what_is_done_already_is_not_proposed() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = qwen3(micro_batch_size=1, lora=LoRAConfig(sequence_mode="local"), **full)
    texts = [saving.step.text for saving in savings(found)]
    assert not [text for text in texts if text.startswith(("recompute", "micro batch", "sequence_mode", "precision"))]
    # More tensor parallelism than the model has keys for is no way out.
    assert not [
        text
        for saving in savings(found.again(sizes=ParallelSizes(8, 8, True, 1, 8)))
        if (text := saving.step.text).startswith("tensor_parallel")
    ]


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**50)
    assert is_out_of_memory(host.value)
    assert bytes_asked(host.value) == 2**52
    assert is_out_of_memory(torch.OutOfMemoryError(MESSAGE))
    assert bytes_asked(torch.OutOfMemoryError("Tried to allocate 20.00 MiB. ")) == 20 * 2**20
    assert bytes_asked(torch.OutOfMemoryError("HIP out of memory.")) is None
    for message in (
        "CUDA error: out of memory",
        "NCCL WARN Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_on_the_host() -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    failure = failure_of(error, torch.device("cuda", 0), 0)  # a loader's, or a checkpoint's
    assert 0 < failure.reserved < failure.total
    text = explain(failure, None, "x")
    assert "Cause: capacity" in text
    assert "fragmentation" not in text


def test_docs_show_an_explanation() -> None:
    page = (Path(__file__).parents[2] / "docs/memory.md").read_text()
    shown = page[page.index("```\nOut of memory") + 4 :].split("```")[0].splitlines()
    estimate = qwen3(lora=LoRAConfig(sequence_mode="gather"))
    failure = Failure(3, 2 * GIB, round(79.1 * GIB), round(1.1 * GIB), 77 * GIB, 70 * GIB)
    said = explain(failure, estimate).splitlines()
    for line in shown:
        assert any(full.startswith(line.removesuffix("...").rstrip()) for full in said), line
