"""What takes less memory, and what it costs: one thing is one row of :data:`REMEDIES`, the cheapest first."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_mcore_lora.memory.estimate import MemoryEstimate
from lightning_mcore_lora.parallel import ParallelSizes

_GUIDE = "Megatron-Bridge's memory guide, Llama 3 70B on H100s"

#: Shares of throughput that are lost.
RECOMPUTED_INPUTS = 0.01
CORE_ATTENTION = 0.027
MICRO_BATCH = 0.05
DISTRIBUTED_OPTIMIZER = 0.02
MLP = 0.16
LAYERS = 1 / 3
EXPERT_PARALLEL = 0.05
TENSOR_PARALLEL = 0.28
PIPELINE_PARALLEL = 0.06


class Step(NamedTuple):
    """What a remedy does to a run.

    Args:
        text: What to set.
        changes: Arguments of :func:`~lightning_mcore_lora.estimate_memory`; ``None`` if they cannot express it.
        saved: Bytes that it saves, where arguments cannot say it.
    """

    text: str
    changes: dict[str, Any] | None
    saved: int | None = None


@dataclass(frozen=True)
class Remedy:
    """One row of :data:`REMEDIES`.

    Args:
        step: What it does to a run; ``None`` if there is nothing that it could.
        lost: Share of throughput that it costs.
        source: Who says so.
        resizes: Whether it changes the layout.
    """

    step: Callable[[MemoryEstimate], Step | None]
    lost: float
    source: str
    resizes: bool = False

    @property
    def cost(self) -> str:
        """The cost, and who says so."""
        return f"{self.lost:.0%} of throughput ({self.source})" if self.lost else f"none ({self.source})"


class Saving(NamedTuple):
    """A remedy for one run.

    Args:
        remedy: The row.
        step: What it does.
        saved: Bytes that it saves by itself; ``None`` if that is not known.
    """

    remedy: Remedy
    step: Step
    saved: int | None


def savings(estimate: MemoryEstimate, least: float = 0.002) -> Iterator[Saving]:
    """What would take less memory in a run, in the order of the table.

    Args:
        estimate: Of the run.
        least: Smaller shares of the whole are left out.
    """
    for remedy in REMEDIES:
        try:
            step = remedy.step(estimate)
            if step is None:
                continue
            saved = step.saved
            if step.changes is not None:
                saved = estimate.total - estimate.again(**step.changes).total
        except (ValueError, NotImplementedError):  # the model, or the processes, cannot be split so
            continue
        if saved is None or saved >= least * estimate.total:
            yield Saving(remedy, step, saved)


# -- steps ---------------------------------------------------------------------------------------------------------


def _half_precision(e: MemoryEstimate) -> Step | None:
    if e.arguments["precision"] == "bf16-true":
        return None
    return Step("precision='bf16-true' (what trains keeps float32 masters)", {"precision": "bf16-true"})


def _flash(e: MemoryEstimate) -> Step | None:
    if e.arguments["accelerator"] != "cuda" or e.arguments["layers"] == "te":
        return None
    return Step("Transformer Engine's layers: pip install it", {"layers": "te", "attention": None})


def _fused_activation(e: MemoryEstimate) -> Step | None:
    if e.arguments["layers"] != "te" or _given(e, "bias_activation_fusion"):
        return None
    return Step("bias_activation_fusion=True", {"bias_activation_fusion": True})


def _local(e: MemoryEstimate) -> Step | None:
    lora = e.arguments["lora"]
    if lora.sequence_mode not in ("gather", "regather"):
        return None
    return Step("sequence_mode='local'", {"lora": dataclasses.replace(lora, sequence_mode="local")})


def _inputs(e: MemoryEstimate) -> Step | None:
    lora = e.arguments["lora"]
    if lora.recompute_inputs or lora.sequence_mode in ("gather", "regather") or _recomputes(e) == "full":
        return None
    return Step("recompute_inputs=True", {"lora": dataclasses.replace(lora, recompute_inputs=True)})


def _given(e: MemoryEstimate, name: str) -> Any:
    """A field of the model's config."""
    return e.arguments.get(name, getattr(e.arguments["source"], name, None))


def _recomputes(e: MemoryEstimate) -> Any:
    return _given(e, "recompute_granularity")


def _selective(e: MemoryEstimate, module: str) -> Step | None:
    if _recomputes(e) == "full":
        return None
    # core_attn is what Megatron-Core takes for none.
    modules = list(_given(e, "recompute_modules") or ("core_attn",)) if _recomputes(e) == "selective" else []
    if module in modules:
        return None
    modules.append(module)
    changes = {"recompute_granularity": "selective", "recompute_modules": modules}
    return Step(f"recompute_granularity='selective', recompute_modules={modules}", changes)


def _feed_forward(e: MemoryEstimate) -> Step | None:
    return _selective(e, "moe" if e.is_mixture else "mlp")


def _layers(e: MemoryEstimate) -> Step | None:
    if _recomputes(e) == "full":
        return None
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Step(
        "recompute_granularity='full', recompute_method='uniform', recompute_num_layers=1",
        {**changes, "recompute_modules": None},
    )


def _micro_batch(e: MemoryEstimate) -> Step | None:
    batch = e.micro_batch_size
    if batch == 1:
        return None
    times = next(number for number in range(2, batch + 1) if batch % number == 0)
    more = "twice" if times == 2 else f"{times} times"
    return Step(f"micro batch {batch // times}, {more} the accumulation", {"micro_batch_size": batch // times})


def _distributed_optimizer(e: MemoryEstimate) -> Step | None:
    sizes = e.sizes
    replicas = sizes.data
    if replicas == 1:
        return None
    of_experts = sizes.world_size // (sizes.expert * sizes.expert_tensor)
    share = e.expert_share * (1 - 1 / of_experts) + (1 - e.expert_share) * (1 - 1 / replicas)
    state = e.components.get("optimizer state", 0) + e.components.get("float32 masters", 0)
    text = (
        f"a distributed optimizer over {replicas} replicas (not with MCoreTP, which takes plain torch optimizers; "
        "optimizer='sgd' has no state)"
    )
    return Step(text, None, round(state * share))


def _resized(e: MemoryEstimate, **changes: int) -> Step:
    given = {**vars(e.sizes), **changes}
    least = max(given["tensor"], given["expert"] * given["expert_tensor"])
    given["world_size"] = max(given["world_size"], least)
    given["sequence_parallel"] = given["sequence_parallel"] or given["tensor"] > 1
    name, size = next(iter(changes.items()))
    more = f" (needs {least} processes)" if least > e.sizes.world_size else ""
    return Step(f"{name}_parallel_size={size}{more}", {"sizes": ParallelSizes(**given)})


def _experts(e: MemoryEstimate) -> Step | None:
    return _resized(e, expert=2 * e.sizes.expert) if e.is_mixture else None


def _tensor(e: MemoryEstimate) -> Step | None:
    sizes = e.sizes
    is_as_wide = sizes.expert_tensor == sizes.tensor
    return _resized(e, tensor=2 * sizes.tensor, **({"expert_tensor": 2 * sizes.expert_tensor} if is_as_wide else {}))


def _pipeline(e: MemoryEstimate) -> Step | None:
    return Step("pipeline parallelism (not with MCoreTP), at the price of half the replicas", None)


REMEDIES: tuple[Remedy, ...] = (
    Remedy(_half_precision, 0.0, "halves the frozen base"),
    Remedy(_flash, 0.0, "its attention keeps no scores"),
    Remedy(_fused_activation, 0.0, "Megatron-Core's kernel keeps gate and up only"),
    Remedy(_local, 0.0, "sends less than both other modes"),
    Remedy(_inputs, RECOMPUTED_INPUTS, "assumed: element-wise work only"),
    Remedy(lambda e: _selective(e, "core_attn"), CORE_ATTENTION, "Korthikanti et al. 2022; more at long sequences"),
    Remedy(_micro_batch, MICRO_BATCH, "assumed: smaller products"),
    Remedy(_distributed_optimizer, DISTRIBUTED_OPTIMIZER, _GUIDE),
    Remedy(_feed_forward, MLP, f"{_GUIDE}, mlp; moe taken to be alike"),
    Remedy(_layers, LAYERS, "FLOPs: a forward is half of a frozen layer's work"),
    Remedy(_experts, EXPERT_PARALLEL, "assumed", resizes=True),
    Remedy(_tensor, TENSOR_PARALLEL, f"{_GUIDE}, TP 4 to 8", resizes=True),
    Remedy(_pipeline, PIPELINE_PARALLEL, f"{_GUIDE}, PP 4 to 8", resizes=True),
)
