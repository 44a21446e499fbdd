"""What a site can do, and why not what was asked for. One reason is one row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.matching import layer_of
from lightning_mcore_lora.adapters.placement import Around
from lightning_mcore_lora.adapters.producers import find_producer
from lightning_mcore_lora.adapters.sites import Site

REGATHER_SITES = ("linear_qkv", "linear_fc1")


@dataclass(frozen=True)
class Obstacle:
    """A reason why a site cannot do something.

    Args:
        holds: Whether the reason applies to a site.
        reason: Said in the report.
    """

    holds: Callable[[Site], Any]
    reason: str


def _config(site: Site, name: str, default: Any = None) -> Any:
    return getattr(site.config, name, default)


def _recomputes(site: Site, module: str) -> bool:
    selective = _config(site, "recompute_granularity") == "selective"
    return selective and module in (_config(site, "recompute_modules") or ())


def _layer_is_recomputed(site: Site) -> bool:
    layer = layer_of(site.name)
    if layer is None or _config(site, "recompute_granularity") != "full":
        return False
    return _config(site, "recompute_method") != "block" or layer < _config(site, "recompute_num_layers")


def norm_is_recomputed(site: Site) -> bool:
    """Whether Megatron-Core frees the norm output that the site reads, and computes it again in backward."""
    return site.leaf in REGATHER_SITES and _recomputes(site, "layernorm") and find_producer(site) is not None


def attention_keeps_output(site: Site) -> bool:
    """Whether the attention before ``linear_proj`` keeps its output for backward: flash and fused kernels do."""
    attention = getattr(site.parents[0], "core_attention", None) if site.parents else None
    is_fused = type(attention).__name__ == "TEDotProductAttention"
    return site.leaf == "linear_proj" and is_fused and not _recomputes(site, "core_attn")


def router_keeps_input(site: Site) -> bool:
    """Whether the site reads what the router beside it reads too, and keeps whether it trains or not."""
    beside = any(hasattr(parent, "router") for parent in site.parents)
    return site.leaf in ("router", "linear_fc1") and beside and not site.experts and site.around is not Around.REMOVED


def _mlp_is_recomputed(site: Site) -> bool:
    is_dense = site.name.split(".")[-2:-1] == ["mlp"] and site.leaf in ("linear_fc1", "linear_fc2")
    return is_dense and _recomputes(site, "mlp")


def _is_in_mixture(site: Site) -> bool:
    return not {"experts", "shared_experts", "router"}.isdisjoint(site.name.split("."))


def _uses_cuda_graphs(site: Site) -> bool:
    named = ("enable_cuda_graph", "external_cuda_graph")
    return any(_config(site, name) for name in named) or _config(site, "cuda_graph_impl", "none") != "none"


def _overlaps_user_buffers(site: Site) -> bool:
    return any(value is True for name, value in vars(site.linear).items() if name.startswith("ub_overlap"))


#: Sites whose linears Megatron-Core does not call, so that an adapter beside them would never run; with the way out.
BYPASSED: tuple[Obstacle, ...] = (
    Obstacle(
        lambda site: site.experts and getattr(site.holder, "_with_fused_impl", False),
        "use_transformer_engine_op_fuser=True fuses experts into one operation: set it to False",
    ),
    Obstacle(
        lambda site: site.parents and type(site.parents[0]).__name__ == "FusedSharedExpertMLP",
        "use_grouped_gemm_for_shared_expert=True fuses shared experts into one operation: set it to False",
    ),
    Obstacle(
        lambda site: site.experts and type(site.holder).__name__ == "InferenceGroupedMLP",
        "InferenceGroupedMLP is for inference: build the model with TEGroupedMLP or SequentialMLP",
    ),
)

#: Modules that hold linears' weights without linears, by name of the class; with the way out.
WITHOUT_LINEARS = {
    "megatron.core.transformer.moe.experts.GroupedMLP": (
        "the legacy GroupedMLP keeps the weights of all experts in one: set moe_use_legacy_grouped_gemm=False, for "
        "Transformer Engine's grouped linears, or moe_grouped_gemm=False, for SequentialMLP"
    ),
}

#: Sites that get no adapter.
NOT_ADAPTED: tuple[Obstacle, ...] = (
    Obstacle(
        lambda site: getattr(site.linear, "disable_grad_reduce", False),
        "its input's gradient is left partial (disable_grad_reduce)",
    ),
)

_OFFLOADED = Obstacle(
    lambda site: _config(site, "cpu_offloading"), "activations are offloaded to the CPU (cpu_offloading)"
)
_GRAPHS = Obstacle(_uses_cuda_graphs, "CUDA graphs are on")
_IS_RECOMPUTED: tuple[Obstacle, ...] = (
    Obstacle(_layer_is_recomputed, "recompute_granularity is 'full': the input is not kept anyway"),
    Obstacle(_mlp_is_recomputed, "recompute_modules has 'mlp': the input is not kept anyway"),
    Obstacle(
        lambda site: _is_in_mixture(site) and _recomputes(site, "moe"),
        "recompute_modules has 'moe': the input is not kept anyway",
    ),
    Obstacle(
        lambda site: "shared_experts" in site.name.split(".") and _recomputes(site, "shared_experts"),
        "recompute_modules has 'shared_experts': the input is not kept anyway",
    ),
)

#: Column-parallel sites that keep the gathered input although re-gather was asked for. Conditions that change from one
#: forward to the next (evaluation, inside an activation checkpoint) are seen by the adapter itself.
NO_REGATHER: tuple[Obstacle, ...] = (
    Obstacle(lambda site: site.group.size() == 1, "tensor_parallel_size is 1: nothing is gathered"),
    Obstacle(lambda site: site.around is not Around.SEQUENCE, "sequence parallelism is off: nothing is gathered"),
    Obstacle(lambda site: site.leaf not in REGATHER_SITES, f"only {' and '.join(REGATHER_SITES)} re-gather"),
    _OFFLOADED,
    _GRAPHS,
    Obstacle(_overlaps_user_buffers, "the linear overlaps its communication in user buffers (tp_comm_overlap)"),
    *_IS_RECOMPUTED,
)

#: Sites that keep their input although it was to be computed again.
NO_RECOMPUTE: tuple[Obstacle, ...] = (
    Obstacle(lambda site: site.type.makes_input, "the linear itself keeps the norm's output, which it returns"),
    Obstacle(attention_keeps_output, "the attention keeps this input anyway, as its output"),
    *_IS_RECOMPUTED,
    Obstacle(norm_is_recomputed, "recompute_modules has 'layernorm': the input is not kept anyway"),
    _OFFLOADED,
    _GRAPHS,
    Obstacle(
        lambda site: find_producer(site) is None,
        "recompute_inputs: no norm or activation is known to compute its input, which is kept",
    ),
)

#: What a site does less well than without an adapter, in any mode.
LOST: tuple[Obstacle, ...] = (
    Obstacle(
        lambda site: site.type.makes_input and _overlaps_user_buffers(site),
        "returning the norm's output turns off the linear's all-gather overlap in forward (tp_comm_overlap)",
    ),
)


def _first(rows: Sequence[Obstacle], site: Site) -> str | None:
    return next((row.reason for row in rows if row.holds(site)), None)


def check_is_called(site: Site) -> None:
    """Check that the model calls the site's linears.

    Raises:
        NotImplementedError: If it does not, with what to set.
    """
    reason = _first(BYPASSED, site)
    if reason:
        raise NotImplementedError(f"{site.name} cannot have an adapter: {reason}, or leave it out of target_modules")


def why_not_adapted(site: Site) -> str | None:
    """The reason why a site gets no adapter, or ``None``."""
    return _first(NOT_ADAPTED, site)


def choose_mode(site: Site, config: LoRAConfig) -> tuple[str, str | None]:
    """The mode a site runs.

    Returns:
        The mode, and the reason if it is not the one asked for.
    """
    mode = "local" if config.sequence_mode == "auto" else config.sequence_mode
    if mode == "regather" and site.kind == "column" and site.around is not Around.REMOVED:
        reason = "freeze_a: the input is not kept anyway" if config.freeze_a else _first(NO_REGATHER, site)
        if reason:
            return "gather", reason
    return mode, None


def what_is_lost(site: Site) -> str | None:
    """What a linear does less well with an adapter, or ``None``."""
    return _first(LOST, site)


def why_not_recomputed(site: Site, mode: str) -> str | None:
    """The reason why a site's input is not computed again in backward, or ``None``."""
    if site.kind == "column" and mode != "local" and site.around is not Around.REMOVED:
        return f"recompute_inputs needs sequence_mode='local': {mode!r} needs the sequence gathered"
    return _first(NO_RECOMPUTE, site)


def site_is_recomputed(site: Site) -> bool:
    """Whether Megatron-Core computes the whole site again in backward, so that nothing of it is kept until then."""
    return _first(_IS_RECOMPUTED, site) is not None


def check_dropout(site: Site) -> None:
    """Check that masks are drawn anew in each forward.

    Raises:
        ValueError: If CUDA graphs would freeze them.
    """
    if _uses_cuda_graphs(site):
        raise ValueError(
            f"dropout needs CUDA graphs off at {site.name}: its seed is drawn on the host, and a graph would replay "
            "one mask for ever. Set dropout=0, or cuda_graph_impl='none'"
        )
