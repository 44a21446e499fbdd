"""What computes an adapter's input, for ``recompute_inputs``: one producer is one row of :data:`PRODUCERS`.

A norm's backward keeps the norm's input, a gated activation's keeps gate and up. From either the adapter's input is had
again element by element. MCore's local attention keeps no output, so ``linear_proj`` keeps its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from lightning_mcore_lora.adapters.linears import bias_of
from lightning_mcore_lora.adapters.placement import Around
from lightning_mcore_lora.adapters.products import Source
from lightning_mcore_lora.adapters.sites import Site

SourceOf = Callable[[tuple, Any, Tensor], Source | None]
Known = tuple[nn.Module, SourceOf]


class Producer:
    """Watches one module, and tells what its last output came from.

    Args:
        module: The module to watch.
        source: ``source(args, output, x)`` gives the source of the adapter's input x, or ``None`` if it is not x's.
    """

    def __init__(self, module: nn.Module, source: SourceOf) -> None:
        self._module = module
        self._source = source
        self._checked = False
        self._last: tuple[tuple, Any] | None = None
        self._handle = module.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._last = (args, output) if torch.is_grad_enabled() else None

    @torch.no_grad()
    def take(self, x: Tensor) -> Source | None:
        """The source of x, once.

        Raises:
            RuntimeError: If what the first source gives is not x.
        """
        last, self._last = self._last, None
        source = self._source(*last, x) if last else None
        if source is not None and not self._checked:
            self._checked = True
            rounding = 16 * torch.finfo(x.dtype).eps
            if not torch.allclose(source.compute(*source.tensors), x, rounding, rounding * x.abs().max().item()):
                raise RuntimeError(
                    f"recompute_inputs: the output of {type(self._module).__name__} does not give the adapter's input "
                    "again (is it changed by a hook, or fused in another form?). Set recompute_inputs=False"
                )
        return source

    def remove(self) -> None:
        """Stop watching."""
        self._last = None
        self._handle.remove()


_NORMS = {"linear_qkv": "input_layernorm", "linear_fc1": "pre_mlp_layernorm", "router": "pre_mlp_layernorm"}


def _unfused_norm(site: Site) -> Known | None:
    if site.experts or site.around is Around.REMOVED:
        return None  # its tokens were gathered
    name = _NORMS.get(site.leaf, "")
    norm = next((getattr(parent, name) for parent in site.parents if hasattr(parent, name)), None)
    if not isinstance(norm, nn.Module) or isinstance(norm, IdentityOp):
        return None
    if site.leaf == "linear_fc1" and getattr(site.config, "mlp_chunks_for_training", 1) > 1:
        return None  # it sees the output in pieces

    def source(args: tuple, output: Any, x: Tensor) -> Source | None:
        return Source(norm.forward, args) if output is x and len(args) == 1 else None

    return norm, source


def _activation(site: Site) -> Known | None:
    mlp: Any = site.parents[0] if site.parents else None
    # With a bias only its sum with fc1's output is kept.
    # An expert's activation is weighted by the router's probability too.
    if site.experts or site.leaf != "linear_fc2" or type(mlp) not in (MLP, SharedExpertMLP):
        return None
    if bias_of(mlp.linear_fc1) is not None:
        return None
    config = mlp.config
    fused_gelu = config.bias_activation_fusion and config.activation_func is torch.nn.functional.gelu
    if config.use_te_activation_func or fused_gelu:
        return None

    def source(args: tuple, output: Any, x: Tensor) -> Source:
        return Source(functools.partial(_activate, config), (output[0],))

    return mlp.linear_fc1, source


def _activate(config: Any, hidden: Tensor) -> Tensor:
    """The MLP's activation of fc1's output."""
    if not config.gated_linear_unit:
        return config.activation_func(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    if config.activation_func_clamp_value is not None:
        limit = config.activation_func_clamp_value
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return config.activation_func(gate) * (up + config.glu_linear_offset)


PRODUCERS: tuple[Callable[[Site], Known | None], ...] = (_unfused_norm, _activation)


def find_producer(site: Site) -> Known | None:
    """The module that computes a site's input, and how to read the source off it; ``None`` if none is known."""
    return next((known for row in PRODUCERS if (known := row(site)) is not None), None)
