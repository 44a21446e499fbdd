"""The adapter module: runs one row of the placement table beside its base linear."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.experts import stream_to_share
from lightning_mcore_lora.adapters.factors import Factors, HeldFactors, Plan
from lightning_mcore_lora.adapters.gemm import Sizes
from lightning_mcore_lora.adapters.linears import bias_of
from lightning_mcore_lora.adapters.placement import Enter, Middle, Placement, Sees
from lightning_mcore_lora.adapters.producers import Producer
from lightning_mcore_lora.adapters.products import Dropout, down, drop, up
from lightning_mcore_lora.adapters.sites import Site

_MIDDLE: dict[Middle, Callable[[Tensor, ProcessGroup], Tensor]] = {
    Middle.AS_IS: lambda z, group: z,
    Middle.GATHER_SEQUENCE: lambda z, group: tensor_parallel.gather_from_sequence_parallel_region(z, group=group),
    Middle.GATHER_RANK: lambda z, group: mappings.all_gather_last_dim_from_tensor_parallel_region(z, group=group),
    Middle.COPY: lambda z, group: tensor_parallel.copy_to_tensor_model_parallel_region(z, group=group),
    Middle.REDUCE: lambda z, group: tensor_parallel.reduce_from_tensor_model_parallel_region(z, group=group),
    Middle.REDUCE_SCATTER: lambda z, group: tensor_parallel.reduce_scatter_to_sequence_parallel_region(z, group=group),
}


class LoRAAdapter(HeldFactors):
    r"""Adds :math:`s B (A x)` to the output of a base linear, in the base's parallel state.

    Args:
        site: The base linear's site.
        plan: What is to become of it.
        config: The user's settings.
    """

    def __init__(self, site: Site, plan: Plan, config: LoRAConfig) -> None:
        super().__init__(site, plan, config)
        self._producer: Producer | None = None
        self._before: Any = None  # attributes of the linear to put back
        self._stream = stream_to_share(site) if config.dropout else None

    def attach(self) -> None:
        """Sit beside the base linear, under its name ``lora``."""
        linear, row = self.site.linear, self.site.type
        self.train(linear.training)
        self._before = row.attach(linear)
        setattr(linear, row.method, functools.partial(self, getattr(linear, row.method)))
        linear.lora = self
        if self.plan.known is not None:
            self._producer = Producer(*self.plan.known)

    def detach(self) -> None:
        """Leave the base linear as it was."""
        linear, row = self.site.linear, self.site.type
        if self._producer is not None:
            self._producer.remove()
        delattr(linear, row.method)
        del linear.lora
        row.detach(linear, self._before)

    def facts(self) -> str:
        """All that must be the same on every rank, in words."""
        return f"{self.site.name}: {self.extra_repr()}, {self.plan.placement.name}, {self.config}"

    def extra_repr(self) -> str:
        """Shown in the model's printout."""
        return f"rank={self.plan.rank}, scale={self.plan.scale:g}, mode={self.plan.placement.mode}"

    def current_placement(self) -> Placement:
        """The row that this forward runs: re-gathering pays only where a backward follows and nothing recomputes."""
        if self.training and self.config.dropout:
            return self.plan.placement  # masks differ from row to row, and a checkpoint's two forwards must agree
        trains = self.training and torch.is_grad_enabled() and self.a.requires_grad
        return self.plan.placement if trains and not random.is_checkpointing() else self.plan.eager

    def forward(self, base: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run base and adapter.

        Args:
            base: The base linear's own method.
            x: The base's input, ``[sequence or its shard, batch, d_in or its shard]``; of experts ``[tokens, d_in]``.
            *args: Passed to ``base``; of several experts in one linear the first is the tokens of each.
            **kwargs: Passed to ``base``.

        Returns:
            What the base returns, with the adapter's output added.
        """
        sizes = None
        if self.site.type.grouped:
            sizes = args[0] if args else kwargs["m_splits"]
            sizes = sizes.tolist() if isinstance(sizes, Tensor) else sizes
        factors = None if self.is_merged else self._factors()
        return self._run(self.site.linear, base, x, args, kwargs, factors, sizes)

    def _run(
        self,
        linear: Any,
        base: Callable[..., Any],
        x: Tensor,
        args: tuple,
        kwargs: dict[str, Any],
        factors: Factors | None,
        sizes: Sizes = None,
    ) -> Any:
        if factors is None:
            if self.training and torch.is_grad_enabled():
                raise RuntimeError(f"{self.site.name}: the adapter is merged; unmerge_lora(model) before training")
            ran = self.site.type.run(linear, base, x, False, args, kwargs)
            return ran.finish(ran.output)
        placement, group = self.current_placement(), self.site.group
        source = self._producer.take(x) if self._producer is not None else None
        gather = placement.enter is Enter.GATHER and group.size() > 1
        ran = self.site.type.run(linear, base, x, gather, args, kwargs)
        dropout = self._draw(placement, x.device)
        scale = self.plan.scale / (1 - dropout.p) if dropout else self.plan.scale
        if placement.enter is Enter.REGATHER and group.size() > 1:
            z = self._regathered(ran.x, factors.a, dropout)
        else:
            z = down(self._entered(ran.x, placement), factors.a, _product_dtype(x), source, dropout, sizes)
        z = _MIDDLE[placement.middle](z * scale, group)
        output = up(ran.output, z, factors.b, self._blocks(), sizes)
        return ran.finish(self._with_magnitude(output, factors.ratio, linear, sizes))

    def _draw(self, placement: Placement, device: torch.device) -> Dropout | None:
        if not self.training or not self.config.dropout:
            return None
        number = 0 if placement.sees is Sees.ALL else self.site.group.rank()
        if self.site.experts:  # outside of their group the tokens are others, though the stream may be the same
            number += torch.distributed.get_rank() - self.site.group.rank()
        return Dropout.draw(self.config.dropout, number, self._stream, device)

    def _entered(self, x: Tensor, placement: Placement) -> Tensor:
        if placement.enter is Enter.COPY and self.site.group.size() > 1:
            return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=self.site.group)
        return x

    def _regathered(self, x: Tensor, a: Tensor, dropout: Dropout | None) -> Tensor:
        # Under autocast Megatron-Core's product would reduce-scatter a gradient of another dtype than its input's.
        dtype = _product_dtype(x)
        x = x.to(dtype)
        return linear_with_grad_accumulation_and_async_allreduce(
            drop(x, dropout) if dropout else x,
            a.to(dtype),
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=True,
            grad_output_buffer=None,
            wgrad_deferral_limit=0,
            tp_group=self.site.group,
        )

    def _with_magnitude(self, output: Tensor, ratio: Tensor | None, linear: Any, sizes: Sizes) -> Tensor:
        if ratio is None:
            return output
        biases = _added_biases(linear, 1 if sizes is None else len(sizes), self.site.type.grouped)
        if sizes is None:
            return _scaled(output, ratio, biases[0])
        parts = zip(output.split(list(sizes)), ratio, biases, strict=True)
        return torch.cat([_scaled(*part) for part in parts])


def _scaled(output: Tensor, ratio: Tensor, bias: Tensor | None) -> Tensor:
    """Rows of the weight scaled, which the bias is not one of."""
    ratio = ratio.to(output.dtype)
    return output * ratio if bias is None else (output - bias) * ratio + bias


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _added_biases(linear: Any, count: int, grouped: bool) -> list[Tensor | None]:
    """The biases that are in the base's output already, not left to its caller."""
    if getattr(linear, "skip_bias_add", False) or getattr(linear, "te_return_bias", False):
        return [None] * count
    return [bias_of(linear, i if grouped else "") for i in range(count)]
