"""Which mode a site runs, and why not the one that was asked for. One reason is one row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.sites import Site

REGATHER_SITES = ("linear_qkv", "linear_fc1")


@dataclass(frozen=True)
class Obstacle:
    """A reason why a site cannot be adapted, or cannot re-gather.

    Args:
        holds: Whether the reason applies to a site.
        reason: Said in the report.
    """

    holds: Callable[[Site], Any]
    reason: str


def _recomputes(site: Site, granularity: str, module: str | None = None) -> bool:
    config = site.linear.config
    return config.recompute_granularity == granularity and (
        module is None or module in (config.recompute_modules or ())
    )


#: Sites that get no adapter.
NOT_ADAPTED: tuple[Obstacle, ...] = (
    Obstacle(lambda site: site.is_expert, "expert linears are not supported yet"),
    Obstacle(lambda site: "shared_experts" in site.name.split("."), "shared-expert linears are not supported yet"),
    Obstacle(lambda site: getattr(site.linear, "gather_output", False), "its output is gathered (gather_output)"),
    Obstacle(lambda site: site.linear.weight is None, "it has no weight of its own (tied to the embedding)"),
)

#: Column-parallel sites that keep the gathered input although re-gather was asked for. Conditions that change from one
#: forward to the next (evaluation, inside an activation checkpoint, A frozen) are seen by the adapter itself.
NO_REGATHER: tuple[Obstacle, ...] = (
    Obstacle(lambda site: site.group.size() == 1, "tensor_parallel_size is 1: nothing is gathered"),
    Obstacle(lambda site: not site.sequence_parallel, "sequence parallelism is off: nothing is gathered"),
    Obstacle(lambda site: site.leaf not in REGATHER_SITES, f"only {' and '.join(REGATHER_SITES)} re-gather"),
    Obstacle(lambda site: site.linear.config.cpu_offloading, "activations are offloaded to the CPU (cpu_offloading)"),
    Obstacle(lambda site: _uses_cuda_graphs(site.linear.config), "CUDA graphs are on"),
    Obstacle(lambda site: _recomputes(site, "full"), "recompute_granularity is 'full': the input is not kept anyway"),
    Obstacle(
        lambda site: site.leaf == "linear_fc1" and _recomputes(site, "selective", "mlp"),
        "recompute_modules has 'mlp': the input is not kept anyway",
    ),
)


def _uses_cuda_graphs(config: Any) -> bool:
    return config.enable_cuda_graph or config.external_cuda_graph or config.cuda_graph_impl != "none"


def why_not_adapted(site: Site) -> str | None:
    """The reason why a site gets no adapter, or ``None``."""
    return next((row.reason for row in NOT_ADAPTED if row.holds(site)), None)


def choose_mode(site: Site, config: LoRAConfig) -> tuple[str, str | None]:
    """The mode a site runs.

    Returns:
        The mode, and the reason if it is not the one asked for.
    """
    mode = "local" if config.sequence_mode == "auto" else config.sequence_mode
    if mode == "regather" and site.kind == "column":
        reason = next((row.reason for row in NO_REGATHER if row.holds(site)), None)
        if reason:
            return "gather", reason
    return mode, None
