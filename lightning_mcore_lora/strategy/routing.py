"""What routers of a mixture of experts do: how evenly they spread tokens, and their auxiliary losses."""

import functools
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class RouterStats:
    """Counts the tokens of each expert in training forwards, and reads the losses that Megatron-Core records.

    Args:
        model: A model with routers; a model without any has no statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self._loads = [torch.zeros(router.config.num_moe_experts) for router in self._routers]
        self._forwards = 0
        for values, _ in _recorded_losses().values():
            values.zero_()
        self._handles = [
            router.register_forward_hook(functools.partial(self._count, i)) for i, router in enumerate(self._routers)
        ]

    def _count(self, index: int, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> None:
        if not (router.training and torch.is_grad_enabled()):  # an evaluation, or to be recomputed
            return
        load = output[1].detach().sum(0)
        self._loads[index] = self._loads[index].to(load.device) + load
        self._forwards += index == 0

    @torch.no_grad()
    def collect(self) -> dict[str, float]:
        """What happened since the last call. A collective over all processes: one all-reduce.

        Returns:
            ``router/max_over_mean_load``, tokens of the fullest expert over the mean, of the layer where that is
            largest; ``router/idle_experts``, experts of all layers that got no token; and, where they are on, each
            auxiliary loss without its coefficient (``router/load_balancing_loss``, 1 at perfect balance,
            ``router/z_loss``), the mean over layers and microbatches. Empty without routers or forwards.
        """
        if not self._routers or not self._forwards:
            return {}
        losses = _recorded_losses()
        world, layers = torch.distributed.get_world_size(), len(self._routers)
        means = []
        for values, group in losses.values():
            # What a group adds up is one replica's; else each rank has its own tokens' mean.
            replicas = world // group.size() if group is not None else world
            means.append(values.sum() / (replicas * layers * self._forwards))
            values.zero_()
        loads = torch.stack(self._loads)
        flat = torch.cat([loads.flatten(), *(mean.reshape(1).to(loads) for mean in means)])
        torch.distributed.all_reduce(flat)
        loads, totals = flat[: loads.numel()].view_as(loads), flat[loads.numel() :].tolist()
        self._loads, self._forwards = [torch.zeros_like(load) for load in loads], 0
        return {
            "router/max_over_mean_load": (loads.max(1).values / loads.mean(1).clamp_min(1e-9)).max().item(),
            "router/idle_experts": float((loads == 0).sum()),
            **{f"router/{name}": total for name, total in zip(losses, totals, strict=True)},
        }

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()


def _recorded_losses() -> dict[str, tuple[Tensor, ProcessGroup | None]]:
    """Name to values by layer, and the group whose values are to be added up."""
    entries: dict[str, Any]
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):  # up to 0.16
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        return {name: (entry["values"], entry["reduce_group"]) for name, entry in entries.items()}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    entries = get_moe_metrics_tracker().metrics
    return {name: (entry.values, entry.reduce_group) for name, entry in entries.items()}
