"""The fastest layout and settings that fit a budget, by estimate."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from lightning_mcore_lora.memory.estimate import MemoryEstimate, estimate_memory
from lightning_mcore_lora.memory.readings import GIB, said, unit_of
from lightning_mcore_lora.memory.remedies import EXPERT_PARALLEL, REMEDIES, TENSOR_PARALLEL
from lightning_mcore_lora.models.described import Source
from lightning_mcore_lora.parallel import ParallelSizes

#: Tensor parallelism stays inside a node.
LARGEST_TENSOR = 8
_SHOWN = 12
_NAMED = 3


class Candidate(NamedTuple):
    """A way to run.

    Args:
        throughput: Relative to one device without any remedy.
        settings: What differs from what was asked.
        estimate: What it takes.
    """

    throughput: float
    settings: tuple[str, ...]
    estimate: MemoryEstimate


class DoesNotFitError(ValueError):
    """No layout and no remedy fits the budget."""


@dataclass(frozen=True)
class Recommendation:
    """The fastest way to run that fits, and the faster ones that do not.

    Args:
        budget_gib: What a rank may take.
        chosen: What fits.
        tried: Those as fast or faster, the fastest first; each takes less than the one before.
        never: The leanest of each layout that nothing makes fit.
    """

    budget_gib: float
    chosen: Candidate
    tried: tuple[Candidate, ...]
    never: tuple[MemoryEstimate, ...] = ()

    @property
    def estimate(self) -> MemoryEstimate:
        """What the chosen one takes."""
        return self.chosen.estimate

    @property
    def why(self) -> str:
        """The reason, in a sentence."""
        settings = ", ".join(self.chosen.settings) or "as asked"
        why = f"{_layout(self.estimate)}, {settings}, is the fastest that fits {self.budget_gib:g} GiB"
        if self.tried:
            why += f"; what is as fast or faster takes {said(self.tried[-1].estimate.total)} or more"
        if self.never:
            layouts = ", ".join(f"{_layout(estimate)} ({said(estimate.total)})" for estimate in self.never[:_NAMED])
            more = f" and {len(self.never) - _NAMED} more" if len(self.never) > _NAMED else ""
            why += f"; nothing makes fit: {layouts}{more}"
        return why

    def to_dict(self) -> dict[str, Any]:
        """The recommendation as plain data, bytes throughout."""
        return {
            "budget": round(self.budget_gib * GIB),
            "why": self.why,
            "settings": list(self.chosen.settings),
            "throughput": self.chosen.throughput,
            "estimate": self.estimate.to_dict(),
        }

    def __rich__(self) -> Table:
        """A table of what was tried, the chosen one last."""
        name, unit = unit_of(self.estimate.total)
        table = Table(
            title=f"What fits {self.budget_gib:g} GiB a rank",
            caption=f"{self.why}\nthroughput: relative, from published losses; see docs/memory.md",
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for column in ("layout", "settings", "throughput", name, "fits"):
            table.add_column(column, justify="right" if column in ("throughput", name) else "left")
        if len(self.tried) >= _SHOWN:
            table.add_row("...", f"{len(self.tried) - _SHOWN + 1} more", "", "", "no")
        for candidate in (*self.tried[-_SHOWN + 1 :], self.chosen):
            estimate = candidate.estimate
            table.add_row(
                _layout(estimate),
                ", ".join(candidate.settings) or "as asked",
                f"{candidate.throughput:.2f}",
                f"{estimate.total / unit:.2f}",
                "yes" if candidate is self.chosen else "no",
            )
        return table


class _Variant(NamedTuple):
    """What may be run, with its share of the layout's throughput."""

    share: float
    estimate: MemoryEstimate


def recommend(
    source: Source, budget_gib: float, devices: int, *, sequence_length: int, **arguments: Any
) -> Recommendation:
    """Search layouts and settings for the fastest that fits, by estimate.

    Layouts are those of ``devices`` processes that the model can be split in; settings are the remedies of
    :mod:`lightning_mcore_lora.memory.remedies`, with the losses of throughput that are published there. Each doubling
    of the tensor-parallel size is taken to lose what was measured from 4 to 8, of the others what is assumed there.

    Args:
        source: See :func:`~lightning_mcore_lora.estimate_memory`.
        budget_gib: GiB that a rank may take: the device's, less a tenth for what is not counted.
        devices: Processes.
        sequence_length: Tokens of a sequence.
        **arguments: Others of :func:`~lightning_mcore_lora.estimate_memory`, but ``sizes``: where the search begins.

    Returns:
        What fits; ``print`` it with rich.

    Raises:
        DoesNotFitError: If nothing does, naming the leanest.
        ValueError: If a setting is unknown, or the model cannot be split at all.
    """
    if not isinstance(budget_gib, int | float) or not budget_gib > 0 or not math.isfinite(budget_gib):
        raise ValueError(f"budget_gib={budget_gib!r} must be a positive number")
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r} must be a positive integer")
    if "sizes" in arguments:
        raise ValueError("sizes is what recommend searches: give devices")
    candidates: list[tuple[float, MemoryEstimate, tuple[str, ...]]] = []
    never: list[MemoryEstimate] = []
    refused: Exception | None = None
    for sizes in _layouts(devices):
        try:
            asked = estimate_memory(source, sizes, sequence_length=sequence_length, **arguments)
        except (ValueError, NotImplementedError) as error:
            refused = refused or error
            continue
        if not asked.is_mixture and (sizes.expert, sizes.expert_tensor) != (1, sizes.tensor):
            continue
        speed = (1 - TENSOR_PARALLEL) ** math.log2(sizes.tensor)
        if asked.is_mixture:
            speed *= (1 - EXPERT_PARALLEL) ** math.log2(sizes.expert * sizes.expert_tensor)
        variants = _variants(asked)
        lean = _leanest(asked, variants)
        if lean.total_gib <= budget_gib:
            candidates += [(speed * share, e, _settings(asked, e)) for share, e in variants]
        else:
            never.append(lean)
    if not candidates and not never:
        raise refused or ValueError(f"no layout of {devices} device(s)")
    tried: list[Candidate] = []
    seen = set()
    for speed, variant, settings in sorted(candidates, key=lambda candidate: (-candidate[0], len(candidate[2]))):
        estimate = None if (variant.sizes, settings) in seen else _estimated(variant)
        seen.add((variant.sizes, settings))
        if estimate is None:
            continue
        candidate = Candidate(speed, settings, estimate)
        if estimate.total_gib <= budget_gib:
            return Recommendation(budget_gib, candidate, tuple(tried), tuple(never))
        if not tried or estimate.total < tried[-1].estimate.total:
            tried.append(candidate)
    leanest = min(never, key=lambda estimate: estimate.total)
    raise DoesNotFitError(
        f"nothing fits budget_gib={budget_gib:g} on {devices} device(s): the leanest takes {leanest.total_gib:.2f} "
        f"GiB, at {_layout(leanest)} in {leanest.arguments['precision']} with every other remedy. Take more devices, "
        "or a shorter sequence"
    )


def _leanest(asked: MemoryEstimate, variants: Sequence[_Variant]) -> MemoryEstimate:
    """With all remedies that go together, in their precision or as asked: with many logits float32 takes less."""
    last = next(found for variant in reversed(variants) if (found := _estimated(variant.estimate)))
    as_asked = dataclasses.replace(last, arguments=last.arguments | {"precision": asked.arguments["precision"]})
    return min((found for found in (asked, last, _estimated(as_asked)) if found), key=lambda found: found.total)


def _estimated(variant: MemoryEstimate) -> MemoryEstimate | None:
    try:
        return variant.again()
    except (ValueError, NotImplementedError):  # Megatron-Core takes these settings not together
        return None


def _layout(estimate: MemoryEstimate) -> str:
    sizes = estimate.sizes
    experts = f", EP={sizes.expert}, ETP={sizes.expert_tensor}" if estimate.is_mixture else ""
    return f"TP={sizes.tensor}{', SP' if sizes.sequence_parallel else ''}{experts}, DP={sizes.data}"


def _layouts(devices: int) -> Iterator[ParallelSizes]:
    for tensor in (size for size in range(1, min(devices, LARGEST_TENSOR) + 1) if devices % size == 0):
        for expert in (size for size in range(1, devices + 1) if devices % size == 0):
            for expert_tensor in sorted({1, tensor}):
                if devices % (expert * expert_tensor) == 0:
                    yield ParallelSizes(devices, tensor, tensor > 1, expert, expert_tensor)


def _variants(asked: MemoryEstimate) -> list[_Variant]:
    """Combinations of the remedies, all of them last. Numbers are still those of what was asked."""
    found = [_Variant(1.0, asked)]
    for remedy in (remedy for remedy in REMEDIES if not remedy.resizes):
        for share, variant in list(found):
            step = remedy.step(variant)
            while step is not None and step.changes is not None:
                share, arguments = share * (1 - remedy.lost), {**variant.arguments, **step.changes}
                variant = dataclasses.replace(variant, arguments=arguments)
                found.append(_Variant(share, variant))
                step = remedy.step(variant)
    return found


def _settings(asked: MemoryEstimate, variant: MemoryEstimate) -> tuple[str, ...]:
    """What differs from what was asked."""
    before, after = ({**vars(e.arguments["lora"]), **e.arguments} for e in (asked, variant))
    return tuple(
        f"{name}={value!r}"
        for name, value in after.items()
        if name not in ("lora", "sizes") and value is not None and value != before.get(name)
    )
