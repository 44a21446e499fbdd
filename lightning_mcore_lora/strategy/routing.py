"""What routers of a mixture of experts do: how evenly they spread tokens, and their auxiliary losses."""

import functools
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:  # 0.16
    moe_logging: Any = None  # type: ignore[no-redef]

#: Kind of load balancing to the name under which it is recorded, and the router's group over which it adds up.
_BALANCING = {
    "aux_loss": ("load_balancing_loss", "tp_cp_group"),
    "seq_aux_loss": ("seq_load_balancing_loss", "tp_cp_group"),
    "global_aux_loss": ("global_load_balancing_loss", "tp_dp_cp_group"),
}


class RouterStats:
    """Counts the tokens of each expert in training forwards, and reads the losses that Megatron-Core records.

    Args:
        model: A model with routers; a model without any has no statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self._loads = [torch.zeros(router.config.num_moe_experts) for router in self._routers]
        self._forwards = 0
        _forget_losses()
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
        if not self._routers:
            return {}
        sizes, totals = self._losses()
        loads = torch.stack(self._loads).to(self._routers[0].weight.device)  # on the host until a forward
        flat = torch.cat([loads.flatten(), loads.new_tensor([self._forwards, *totals])])
        torch.distributed.all_reduce(flat)
        loads, (forwards, *sums) = flat[: loads.numel()].view_as(loads), flat[loads.numel() :].tolist()
        self._loads, self._forwards = [torch.zeros_like(load) for load in loads], 0
        if not forwards:
            return {}
        count = forwards * len(self._routers)
        return {
            "router/max_over_mean_load": (loads.max(1).values / loads.mean(1).clamp_min(1e-9)).max().item(),
            "router/idle_experts": float((loads == 0).sum()),
            # Where a group adds up, one value is its members' together.
            **{f"router/{name}": total * size / count for (name, size), total in zip(sizes.items(), sums, strict=True)},
        }

    def _losses(self) -> tuple[dict[str, int], list[float]]:
        """Of each auxiliary loss that is on: the size of the group whose values add up, and this rank's sum."""
        router = self._routers[0]
        sizes = {
            name: getattr(router, group).size()
            for kind, (name, group) in _BALANCING.items()
            if router.get_aux_loss_coeff(kind) > 0
        }
        if router.config.moe_z_loss_coeff is not None:
            sizes["z_loss"] = 1
        recorded = _recorded_losses()
        sums = [recorded[name].sum().item() if name in recorded else 0.0 for name in sizes]
        _forget_losses()
        return sizes, sums

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()


def _recorded_losses() -> dict[str, Tensor]:
    """Name to values by layer, which Megatron-Core adds up until they are forgotten."""
    if moe_logging is None:
        return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}
    return {name: entry.values for name, entry in moe_logging.get_moe_metrics_tracker().metrics.items()}


def _forget_losses() -> None:
    if moe_logging is None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()
