"""Experts of a mixture: which factors they share, which of them a rank holds, and who sees the same tokens."""

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.sites import Site

#: Factors of which each expert has its own, by ``LoRAConfig.expert_adapters`` and the kind of linear. The outer factors
#: are those at the model's hidden size: A of the column-parallel ``linear_fc1``, B of the row-parallel ``linear_fc2``.
EACH: dict[str, dict[str, frozenset[str]]] = {
    "per_expert": {"column": frozenset("ab"), "row": frozenset("ab")},
    "shared": {"column": frozenset(), "row": frozenset()},
    "shared_outer": {"column": frozenset("b"), "row": frozenset("a")},
}


def factors_of_each(site: Site, layout: str, dora: bool) -> frozenset[str]:
    """Names of an adapter's parameters of which each expert has its own; magnitudes are always its own weight's."""
    if not site.experts:
        return frozenset()
    return EACH[layout][site.kind] | (frozenset(("magnitude",)) if dora else frozenset())


def local_experts(site: Site) -> range:
    """Numbers, over all ranks, of the experts that this rank holds."""
    first = parallel_state.get_expert_model_parallel_rank() * site.experts
    return range(first, first + site.experts)


def shared_group(group: ProcessGroup | None) -> ProcessGroup:
    """Processes that have a part of the gradient of what all experts share.

    Args:
        group: Those that have a part of one expert's: its expert-tensor-parallel group, or ``None``.
    """
    if group is None or group.size() == 1:
        return parallel_state.get_expert_model_parallel_group()
    return parallel_state.get_expert_tensor_and_model_parallel_group()


def stream_to_share(site: Site) -> ProcessGroup | None:
    """The group of a site if its processes do not draw from one random stream; tensor-parallel peers do."""
    ranks = torch.distributed.get_process_group_ranks(site.group)
    peers = torch.distributed.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    return None if set(ranks) <= set(peers) else site.group
