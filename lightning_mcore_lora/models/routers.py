"""Routers of a mixture of experts under autocast."""

from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


def keep_from_autocast(model: torch.nn.Module) -> None:
    """Have routers compute in the precision that they were built for, also under autocast.

    Autocast would undo ``moe_router_dtype`` in forward, and Megatron-Core's gating product, which knows nothing of it,
    would meet two dtypes in backward.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter):
            outside = _OutsideAutocast()
            module.register_forward_pre_hook(outside.enter)
            module.register_forward_hook(outside.leave, always_call=True)


class _OutsideAutocast:
    def __init__(self) -> None:
        self._stack = ExitStack()

    def enter(self, module: torch.nn.Module, args: tuple) -> None:
        self._stack.enter_context(torch.autocast(args[0].device.type, enabled=False))

    def leave(self, *_: Any) -> None:
        self._stack.close()
