"""What a window of logging reads, on CUDA from recorded statistics of the allocator."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore_lora.memory import readings
from lightning_mcore_lora.memory.readings import GIB, MemoryWindow, worst_over_ranks

#: As ``torch.cuda.memory_stats`` gives them, before a window and at its end.
RECORDED: list[dict[str, int]] = [
    {"num_alloc_retries": 1, "num_ooms": 0},
    {
        "allocated_bytes.all.current": 6 * GIB,
        "allocated_bytes.all.peak": 9 * GIB,
        "reserved_bytes.all.current": 8 * GIB,
        "reserved_bytes.all.peak": 10 * GIB,
        "num_alloc_retries": 4,
        "num_ooms": 1,
    },
    {"num_alloc_retries": 4, "num_ooms": 1},
    {},
]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda stood in for; the calls that were made."""
    calls: list[str] = []
    stats = iter(RECORDED)

    def memory_stats(device: Any) -> dict[str, int]:
        calls.append("read")
        return next(stats)

    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    return calls


def test_cuda(recorded: list[str]) -> None:
    window = MemoryWindow(torch.device("cuda", 0))
    assert window.close() == {
        "memory/peak_allocated_gib": 9.0,
        "memory/peak_reserved_gib": 10.0,
        "memory/allocated_gib": 6.0,
        "memory/fragmentation": 0.25,
        "memory/alloc_retries": 3.0,
        "memory/ooms": 1.0,
    }
    assert recorded == ["read", "reset", "read", "reset"], "one reading a window, and peaks begin anew"
    again = window.close()
    assert (again["memory/alloc_retries"], again["memory/ooms"]) == (0.0, 0.0), "counted since the last window"
    assert again["memory/fragmentation"] == 0.0, "of nothing"


def test_cpu_has_nothing_of_cuda() -> None:
    window = MemoryWindow(torch.device("cpu"))
    values = window.close()
    assert set(values) == {"memory/peak_rss_gib", "memory/rss_gib"}
    assert values["memory/peak_rss_gib"] >= values["memory/rss_gib"] > 0.01
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert window.close()["memory/rss_gib"] > values["memory/rss_gib"] + 0.05
    assert len(held)


def test_the_peak_is_not_the_parents() -> None:
    """A process that another started has that one's peak in its resource usage."""
    held = torch.ones(2**30, dtype=torch.uint8)
    code = "import psutil, runpy, sys; peak = runpy.run_path(sys.argv[1])['peak_rss']; own = b'x' * 2**28; "
    code += "print(peak(), psutil.Process().memory_info().rss)"
    started = [sys.executable, "-c", code, readings.__file__]
    peak, now = map(int, subprocess.run(started, capture_output=True, text=True, check=True).stdout.split())
    assert 0.99 * now <= peak < len(held)


def test_docs_name_every_key(recorded: list[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/memory.md").read_text()
    devices = (torch.device("cuda", 0), torch.device("cpu"))
    for key in ("memory/worst_rank", *(key for device in devices for key in MemoryWindow(device).close())):
        assert f"`{key}`" in page


def test_alone_this_is_the_worst_rank() -> None:
    values, peaks = worst_over_ranks({"peak": 3.0}, "peak", torch.device("cpu"))
    assert values == {"peak": 3.0, "memory/worst_rank": 0.0}
    assert peaks == [3.0]
