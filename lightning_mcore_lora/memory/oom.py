"""Out of memory, explained: what held the memory, and the cheapest way out."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
import torch

from lightning_mcore_lora.memory import allocator
from lightning_mcore_lora.memory.estimate import MemoryEstimate
from lightning_mcore_lora.memory.readings import GIB, MIB, said
from lightning_mcore_lora.memory.remedies import savings
from lightning_mcore_lora.memory.situation import Situation, torch_version

_CPU = re.compile(r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes")
_CUDA = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
#: As torch words what its allocator held when it failed: later some of it is freed.
_ALLOCATED = re.compile(r"([\d.]+) (\w+) is allocated by PyTorch")
_IDLE = re.compile(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated")
#: What others say that found the device full: the driver, NCCL, cuBLAS.
_OTHERS = re.compile(r"CUDA error: out of memory|Cuda failure \d+ 'out of memory'|CUBLAS_STATUS_ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB}

#: A larger share of reserved memory that no tensor takes is called fragmentation though it would not have sufficed.
NOTABLE = 0.1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory did not suffice, the device's or the host's."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or bool(_CPU.search(said) or _OTHERS.search(said))


def bytes_asked(error: BaseException) -> int | None:
    """Bytes of the allocation that failed, as the message has them."""
    if found := _CPU.search(str(error)):
        return int(found[1])
    return _bytes(_CUDA, error)


def _bytes(pattern: re.Pattern[str], error: BaseException) -> int | None:
    found = pattern.search(str(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


@dataclass(frozen=True)
class Failure:
    """What is known when memory did not suffice.

    Args:
        rank: Of this process.
        asked: Bytes of the allocation that failed, if known.
        total: Bytes of the device, or of the host.
        free: Bytes of it that nobody holds.
        reserved: Bytes that this process holds of it.
        allocated: Bytes that tensors take of those; ``None`` where only the process as a whole is known.
        expandable_segments: Whether the allocator's segments can grow.
        peaks: Peak bytes of each rank in the last window that was logged; empty if there was none.
        step: Optimizer steps when it was logged.
        can_expand: Whether expandable segments would fit what else is set.
    """

    rank: int
    asked: int | None
    total: int
    free: int
    reserved: int
    allocated: int | None = None
    expandable_segments: bool = False
    peaks: Sequence[float] = ()
    step: int = 0
    can_expand: bool = True

    @property
    def idle(self) -> int:
        """Bytes that the process holds and no tensor takes."""
        return 0 if self.allocated is None else self.reserved - self.allocated

    @property
    def is_fragmented(self) -> bool:
        """Whether memory that is held would have sufficed, or is a notable part."""
        return self.idle > 0 and (self.idle >= (self.asked or self.total) or self.idle >= NOTABLE * self.reserved)


def failure_of(
    error: BaseException, device: torch.device, rank: int, peaks: Sequence[float] = (), step: int = 0
) -> Failure:
    """Read what is known of a failure on this process."""
    asked = bytes_asked(error)
    if device.type != "cuda" or _CPU.search(str(error)):
        host = psutil.virtual_memory()
        held = psutil.Process().memory_info().rss
        return Failure(rank, asked, host.total, host.available, held, peaks=peaks, step=step)
    free, total = torch.cuda.mem_get_info(device)
    stats: Mapping[str, Any] = torch.cuda.memory_stats(device)
    running = allocator.running()
    allocated, idle = _bytes(_ALLOCATED, error), _bytes(_IDLE, error)
    if allocated is None or idle is None:
        allocated = stats.get("allocated_bytes.all.current", 0)
        idle = stats.get("reserved_bytes.all.current", 0) - allocated
    situation = Situation(environ=os.environ, torch_version=torch_version(), running=running)
    return Failure(
        rank,
        asked,
        total,
        free,
        allocated + idle,
        allocated,
        situation.expandable,
        peaks,
        step,
        can_expand=not situation.refuses_expandable,
    )


def explain(failure: Failure, estimate: MemoryEstimate | None, why_none: str = "") -> str:
    """Say what held the memory, and what to do, the cheapest first.

    Args:
        failure: What is known.
        estimate: Of the run; ``None`` if there is none.
        why_none: Why not.
    """
    lines = [f"Out of memory on rank {failure.rank}, explained by MemoryMonitor", *_held(failure), _cause(failure)]
    if len(failure.peaks) > 1:
        lines.append(_ranks(failure))
    if estimate is None:
        lines.append(f"No estimate: {why_none}")
    else:
        largest = ", ".join(f"{name} {said(count)}" for name, count in estimate.largest[:4])
        batch = f"{estimate.micro_batch_size} x {estimate.sequence_length:,} tokens"
        lines.append(f"Estimated for {batch}: {said(estimate.total)}; largest: {largest}")
    steps = _steps(failure, estimate)
    if steps:
        lines += [
            "Next steps, in the order to try them (each by itself):",
            *(f"  {i}. {s}" for i, s in enumerate(steps, 1)),
        ]
    return "\n".join(lines)


def _held(f: Failure) -> list[str]:
    asked = "" if f.asked is None else f"{said(f.asked)} more were asked for. "
    lines = [f"{asked}This process holds {said(f.reserved)} of {said(f.total)}; {said(f.free)} are free"]
    if f.allocated is not None:
        share = f.idle / f.reserved if f.reserved else 0.0
        lines[0] += f"; others, and this one outside torch, hold {said(max(f.total - f.free - f.reserved, 0))}"
        lines.append(f"Tensors take {said(f.allocated)}; {said(f.idle)} no tensor takes (fragmentation {share:.0%})")
    return lines


def _cause(f: Failure) -> str:
    if not f.is_fragmented:
        return "Cause: capacity: more is needed than there is"
    if f.asked is not None and f.idle >= f.asked:
        return "Cause: fragmentation: what no tensor takes would do, but not in one piece"
    return "Cause: capacity, and fragmentation: a notable part is held in pieces that no tensor fits into"


def _ranks(f: Failure) -> str:
    least, most, mine, middle = (p / GIB for p in (min(f.peaks), max(f.peaks), f.peaks[f.rank], median(f.peaks)))
    line = (
        f"Ranks at step {f.step}: {least:.2f} to {most:.2f} GiB, the largest rank {f.peaks.index(max(f.peaks))}'s; "
        f"this one {mine:.2f}, {mine / middle:.2f} times the median"
    )
    if most > 1.1 * middle:
        line += ". That is uneven: experts that get more tokens than others, or batches of unequal length"
    return line


def _steps(f: Failure, estimate: MemoryEstimate | None) -> list[str]:
    steps = []
    if f.is_fragmented and not f.expandable_segments and f.can_expand:
        steps.append(f"add expandable_segments:True to {allocator.VARIABLES[0]}: up to {said(f.idle)}, cost none")
    for remedy, step, saved in () if estimate is None else savings(estimate):
        size = "not estimated" if saved is None else said(saved)
        steps.append(f"{step.text}: {size}, cost {remedy.cost}")
    return steps
