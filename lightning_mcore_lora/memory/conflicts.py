"""Settings that do not fit each other, or the device: one is one row of :data:`CONFLICTS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_mcore_lora.memory.allocator import READS_BOTH, VARIABLES, parse_settings, variable_read
from lightning_mcore_lora.memory.readings import GIB
from lightning_mcore_lora.memory.situation import FITS_NCCL_BUFFERS, TOKENS, Situation

#: The first compute capability of the Blackwell generation.
BLACKWELL = (10, 0)

_FIRST, _SECOND = VARIABLES
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_GRAPHS = "NCCL registers the buffers of a captured collective, and does not know of segments that grow"


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: Of the conflict.
        severity: ``"error"``: the run would fail or be wrong; ``"warning"``: it is slower or takes more memory than it
            need; ``"advice"``: worth knowing, told by the doctor only.
        versions: Where it holds.
        found: What of it is found in a situation, or ``None``.
        cause: Why that does not fit.
        confirm: How to see it.
        fix: What to do.
    """

    name: str
    severity: str
    versions: str
    found: Callable[[Situation], str | None]
    cause: str
    confirm: str
    fix: str


class Conflict(NamedTuple):
    """A row that holds, and what was found.

    Args:
        row: The row.
        detail: What was found.
    """

    row: Row
    detail: str

    def __str__(self) -> str:
        return f"{self.row.name}: {self.detail}. {self.row.cause}. Fix: {self.row.fix}"


def find_conflicts(situation: Situation) -> list[Conflict]:
    """All conflicts of a situation, in the order of the table."""
    found = ((row, row.found(situation)) for row in CONFLICTS)
    return [Conflict(row, detail) for row, detail in found if detail]


# -- the allocator -------------------------------------------------------------------------------------------------


def _expandable_unset(s: Situation) -> str | None:
    if not s.cuda or s.expandable or "expandable_segments" in s.requested:
        return None  # or they are off by choice
    if s.refuses_expandable or s.requested.get("backend", "native") != "native":
        return None  # another allocator has none
    name = variable_read(s.environ, s.torch_version)
    return "no variable sets them" if name is None else f"{name}={s.environ[name]!r}"


def _too_late(s: Situation) -> str | None:
    if s.running is None:
        return None
    told = s.requested if s.running.settings is None else s.running.settings
    used = told | {"expandable_segments": str(s.running.expandable_segments)}
    names = sorted(name for name, value in s.requested.items() if used.get(name) != value)
    differ = (f"{name} is {used.get(name, 'unset')}, not {s.requested[name]}" for name in names)
    return "; ".join(differ) or None


def _both_variables(s: Situation) -> str | None:
    if not s.cuda or not all(name in s.environ for name in VARIABLES):
        return None
    first, second = (s.environ[name] for name in VARIABLES)
    return None if parse_settings(first) == parse_settings(second) else f"{_FIRST}={first!r}, {_SECOND}={second!r}"


def _second_not_read(s: Situation) -> str | None:
    is_alone = _SECOND in s.environ and _FIRST not in s.environ
    return f"{_SECOND}={s.environ[_SECOND]!r}" if s.cuda and is_alone and s.torch_version < READS_BOTH else None


def _nccl_buffers(s: Situation) -> str | None:
    is_refused = s.cuda and s.expandable and s.buffers_refuse_expandable
    return f"{s.nccl_buffers} with expandable_segments:True" if is_refused else None


def _nccl_buffers_by_name(s: Situation) -> str | None:
    # Word by word as Megatron-Core asks, at any torch.
    is_refused = "expandable_segments:True" in s.environ.get(_FIRST, "").split(",")
    is_new = s.torch_version >= FITS_NCCL_BUFFERS
    return f"{_FIRST}={s.environ[_FIRST]!r}" if s.cuda and is_new and s.of_ddp("nccl_ub") and is_refused else None


def _graphs(s: Situation) -> str | None:
    if not (s.cuda and s.expandable and s.registers_graphs):
        return None
    return f"expandable_segments:True, NCCL_GRAPH_REGISTER={s.environ.get('NCCL_GRAPH_REGISTER', 'unset')}"


def _graphs_of_te(s: Situation) -> str | None:
    return _graphs(s) if s.cuda_graphs == "transformer_engine" else None


def _graphs_of_mcore(s: Situation) -> str | None:
    is_spared = s.capability is not None and s.capability >= BLACKWELL
    return _graphs(s) if s.cuda_graphs not in ("none", "transformer_engine") and not is_spared else None


def _user_pools(s: Situation) -> str | None:
    pools = 0 if s.running is None else s.running.user_pools
    return f"{pools} pool(s)" if pools and s.expandable and s.torch_version < FITS_NCCL_BUFFERS else None


# -- launches ------------------------------------------------------------------------------------------------------


def _connections_tp(s: Situation) -> str | None:
    value = s.environ.get(_CONNECTIONS)
    is_older = s.capability is not None and s.capability < BLACKWELL
    if not (s.cuda and is_older and s.sizes.tensor > 1) or s.fsdp or value == "1":
        return None
    return f"{_CONNECTIONS}={value or 'unset'} at tensor_parallel_size={s.sizes.tensor}"


def _connections_fsdp(s: Situation) -> str | None:
    return f"{_CONNECTIONS}=1" if s.cuda and s.fsdp and s.environ.get(_CONNECTIONS) == "1" else None


def _connections_blackwell(s: Situation) -> str | None:
    is_new = s.capability is not None and s.capability >= BLACKWELL
    return f"{_CONNECTIONS}=1" if s.cuda and is_new and not s.fsdp and s.environ.get(_CONNECTIONS) == "1" else None


# -- the model -----------------------------------------------------------------------------------------------------


def _offload_pipeline(s: Situation) -> str | None:
    size = s.of_config("pipeline_model_parallel_size") or 1
    return f"pipeline_model_parallel_size={size}" if s.of_config("cpu_offloading") and size > 1 else None


def _offload_recompute(s: Situation) -> str | None:
    granularity = s.of_config("recompute_granularity")
    return f"recompute_granularity={granularity!r}" if s.of_config("cpu_offloading") and granularity else None


def _gathered(s: Situation) -> str | None:
    sites = [site for site in s.sites if site.cost.gathered_per_token]
    tokens = s.tokens or TOKENS
    more = sum(site.cost.gathered_per_token for site in sites) * tokens / GIB
    per = f"a microbatch of {tokens:,} tokens" if s.tokens else f"each {tokens:,} tokens of a microbatch"
    return f"{len(sites)} site(s) keep {more:.3g} GiB more than their shard for {per}" if sites else None


def _fallbacks(s: Situation) -> str | None:
    sites = [site for site in s.sites if site.mode and site.reason]
    reasons = "; ".join(sorted({site.reason or "" for site in sites}))
    return f"{len(sites)} site(s), {sites[0].site} first: {reasons}" if sites else None


# -- the distributed optimizer -------------------------------------------------------------------------------------


def _shards_nothing(s: Situation) -> str | None:
    is_alone = s.of_ddp("use_distributed_optimizer") and s.sizes.data == 1
    return f"use_distributed_optimizer=True on {s.sizes.data} replica" if is_alone else None


def _overlaps_gather(s: Situation) -> str | None:
    if not s.of_ddp("overlap_param_gather"):
        return None
    names = ("use_distributed_optimizer", "overlap_grad_reduce")
    missing = [f"{name}=False" for name in names if not s.of_ddp(name)]
    return f"overlap_param_gather=True with {', '.join(missing)}" if missing else None


CONFLICTS: tuple[Row, ...] = (
    Row(
        "expandable segments unset",
        "warning",
        "any torch, CUDA",
        _expandable_unset,
        "Batches of changing length then leave gaps that no tensor fits into, and a run ends out of memory with memory "
        "left",
        "`memory/fragmentation` grows, or `memory/alloc_retries` is not 0",
        f"`export {_FIRST}=expandable_segments:True` before the start; MCoreTP sets it where neither variable is set",
    ),
    Row(
        "allocator settings set too late",
        "warning",
        "any torch, CUDA",
        _too_late,
        "The allocator reads its variable once, when CUDA starts, and goes on with what it read (or this platform does "
        "not have the option)",
        "`torch.cuda.memory._snapshot()['allocator_settings']`",
        "set the variable before Python starts, or before anything touches CUDA",
    ),
    Row(
        "both allocator variables",
        "warning",
        "any torch, CUDA",
        _both_variables,
        f"CUDA reads {_FIRST} only, even if it is empty",
        f"`env`: the content of {_SECOND} is not in force",
        f"unset one; what should hold goes into {_FIRST}",
    ),
    Row(
        "allocator variable not read",
        "warning",
        "torch below 2.11, CUDA",
        _second_not_read,
        f"This torch's CUDA allocator reads {_FIRST} only (pytorch#183387)",
        "`torch.cuda.memory._snapshot()['allocator_settings']`",
        f"use {_FIRST}, or torch 2.11",
    ),
    Row(
        "NCCL user buffers and expandable segments",
        "error",
        "torch below 2.11, CUDA",
        _nccl_buffers,
        "NCCL cannot register memory that is mapped in pieces: it fails, or reads what it should not "
        "(Megatron-LM#4492, nccl#1584)",
        "`RuntimeError` or an illegal access at the first collective",
        f"take expandable_segments out of {_FIRST}, or the user buffers out of the run, or use torch 2.11",
    ),
    Row(
        "nccl_ub refused by name",
        "advice",
        "torch 2.11 and later with Megatron-Core that does not ask for torch's version (0.16), CUDA",
        _nccl_buffers_by_name,
        f"Megatron-Core refuses nccl_ub for that very word in {_FIRST}, though this torch can do both",
        "`ValueError` where Megatron-Core's DistributedDataParallelConfig is made",
        f"put the setting into {_SECOND}, which this torch reads too",
    ),
    Row(
        "Transformer Engine's CUDA graphs and expandable segments",
        "error",
        "any Megatron-Core, any device",
        _graphs_of_te,
        _GRAPHS,
        "`AssertionError` in Megatron-Core where a graph is made",
        "`export NCCL_GRAPH_REGISTER=0` before the start; MCoreTP sets it together with expandable segments",
    ),
    Row(
        "Megatron-Core's CUDA graphs and expandable segments",
        "warning",
        "below Blackwell",
        _graphs_of_mcore,
        _GRAPHS,
        "an illegal access in a captured collective; `AssertionError` before in Megatron-Core 0.16",
        "`export NCCL_GRAPH_REGISTER=0` before the start; MCoreTP sets it together with expandable segments",
    ),
    Row(
        "memory pools and expandable segments",
        "warning",
        "torch below 2.11, CUDA",
        _user_pools,
        "A torch.cuda.MemPool with an allocator of its own cannot have expandable segments there (pytorch#147851)",
        "`torch.cuda.memory._snapshot()['segments']`: a segment_pool_id (0, n)",
        f"take expandable_segments out of {_FIRST}, or use torch 2.11",
    ),
    Row(
        "CUDA_DEVICE_MAX_CONNECTIONS for tensor parallelism",
        "warning",
        "below Blackwell",
        _connections_tp,
        "Megatron-Core launches a collective before the product that hides it, which only one hardware queue keeps in "
        "order there",
        "a profile: collectives and products of a layer one after the other",
        f"`export {_CONNECTIONS}=1` before the start; MCoreTP sets it where it is not set",
    ),
    Row(
        "CUDA_DEVICE_MAX_CONNECTIONS for FSDP",
        "warning",
        "any device",
        _connections_fsdp,
        "With one hardware queue the gathers of parameters wait for the products that they should hide behind",
        "a profile: gaps between layers",
        f"`unset {_CONNECTIONS}`",
    ),
    Row(
        "CUDA_DEVICE_MAX_CONNECTIONS on Blackwell",
        "advice",
        "Blackwell",
        _connections_blackwell,
        "This generation keeps launches in order by itself, and one queue is one more wait",
        "a profile, with and without",
        f"`unset {_CONNECTIONS}`, or 32",
    ),
    Row(
        "CPU offloading with pipeline parallelism",
        "error",
        "any Megatron-Core",
        _offload_pipeline,
        "Megatron-Core cannot offload activations of several stages",
        "`ValueError` where TransformerConfig is made",
        "cpu_offloading=False, or pipeline_model_parallel_size=1",
    ),
    Row(
        "CPU offloading with recompute",
        "error",
        "any Megatron-Core",
        _offload_recompute,
        "What is computed again is not there to be offloaded",
        "`ValueError` where TransformerConfig is made",
        "cpu_offloading=False, or recompute_granularity=None",
    ),
    Row(
        "gathered inputs kept",
        "warning",
        "any",
        _gathered,
        "In the mode gather a column-parallel adapter keeps the whole sequence for backward on every rank",
        "the column `kept` of the report of adapters",
        "sequence_mode='local', the default, which keeps the shard only; or regather=True",
    ),
    Row(
        "adapters that fell back",
        "advice",
        "any",
        _fallbacks,
        "They do not run as asked",
        "the notes below the report of adapters",
        "what the reason names; sequence_mode='local' has fewest conditions",
    ),
    Row(
        "distributed optimizer on one replica",
        "advice",
        "any Megatron-Core, in a loop of your own",
        _shards_nothing,
        "It splits optimizer state over data-parallel replicas, and there is one",
        "`world_size` equals `tensor_parallel_size`",
        "use_distributed_optimizer=False",
    ),
    Row(
        "overlap_param_gather without its conditions",
        "advice",
        "Megatron-Core without a layer-wise optimizer (0.16), in a loop of your own",
        _overlaps_gather,
        "Parameters are gathered for the distributed optimizer only, and in the order in which gradients were reduced",
        "a profile: no gather runs beside the forward",
        "set both, or overlap_param_gather=False",
    ),
)
