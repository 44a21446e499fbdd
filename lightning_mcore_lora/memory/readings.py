"""Memory of this process in one window of logging, and the worst of all ranks."""

import resource
import sys
from collections.abc import Mapping
from typing import Any

import psutil
import torch

GIB = 2**30
MIB = 2**20
WORST = "memory/worst_rank"


def unit_of(count: float) -> tuple[str, int]:
    """The unit to tell a number of bytes in, and its size."""
    return ("GiB", GIB) if count >= GIB / 10 else ("MiB", MIB)


def said(count: float) -> str:
    """A number of bytes in words."""
    name, unit = unit_of(count)
    return f"{count / unit:.2f} {name}"


class MemoryWindow:
    """Reads this process's memory from one logged step to the next.

    On CUDA what the allocator counts on one device, whose peaks begin anew with each window:

    - ``memory/peak_allocated_gib``: the most that tensors took (``torch.cuda.max_memory_allocated``)
    - ``memory/peak_reserved_gib``: the most that the allocator held of the device
    - ``memory/allocated_gib``: what tensors take now
    - ``memory/fragmentation``: the share of what the allocator holds now that no tensor takes
    - ``memory/alloc_retries``, ``memory/ooms``: allocations that freed cached memory first, and those that failed

    On the CPU the process's resident set, whose peak does not begin anew:

    - ``memory/peak_rss_gib``: the most since the program began
    - ``memory/rss_gib``: what it takes now

    Args:
        device: The process's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._counts: dict[str, int] = {}
        if device.type == "cuda":
            self._counts = self._counters(torch.cuda.memory_stats(device))
            torch.cuda.reset_peak_memory_stats(device)  # of loading

    @property
    def peak(self) -> str:
        """The key by which ranks are compared."""
        return "memory/peak_allocated_gib" if self._device.type == "cuda" else "memory/peak_rss_gib"

    def close(self) -> dict[str, float]:
        """Read the window, and begin the next."""
        if self._device.type != "cuda":
            now = self._process.memory_info().rss
            return {"memory/peak_rss_gib": max(peak_rss(), now) / GIB, "memory/rss_gib": now / GIB}
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before, self._counts = self._counts, self._counters(stats)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return {
            "memory/peak_allocated_gib": stats.get("allocated_bytes.all.peak", 0) / GIB,
            "memory/peak_reserved_gib": stats.get("reserved_bytes.all.peak", 0) / GIB,
            "memory/allocated_gib": allocated / GIB,
            "memory/fragmentation": (reserved - allocated) / reserved if reserved else 0.0,
            **{f"memory/{name}": float(count - before[name]) for name, count in self._counts.items()},
        }

    @staticmethod
    def _counters(stats: Mapping[str, Any]) -> dict[str, int]:
        """Counts since the process began, which no reset touches."""
        return {"alloc_retries": stats.get("num_alloc_retries", 0), "ooms": stats.get("num_ooms", 0)}


def peak_rss() -> int:
    """Bytes of the largest resident set of this program."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    # Not getrusage: a program that another process started has that process's peak there.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def worst_over_ranks(values: dict[str, float], peak: str, device: torch.device) -> tuple[dict[str, float], list[float]]:
    """The largest of each value over all ranks with ``memory/worst_rank``, the rank of the largest peak; and all peaks.

    One all-reduce over the world, of the values and a slot for each rank's peak.

    Args:
        values: This rank's, under the same keys on each.
        peak: The key of the peak.
        device: Where the collective runs.

    Returns:
        The values, and the peak of each rank.
    """
    if not torch.distributed.is_initialized():
        return values | {WORST: 0.0}, [values[peak]]
    slots = [0.0] * torch.distributed.get_world_size()
    slots[torch.distributed.get_rank()] = values[peak]
    stacked = torch.tensor([*values.values(), *slots], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(stacked, op=torch.distributed.ReduceOp.MAX)
    numbers = stacked.tolist()
    largest, peaks = numbers[: len(values)], numbers[len(values) :]
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    return dict(zip(values, largest, strict=True)) | {WORST: float(worst)}, peaks
