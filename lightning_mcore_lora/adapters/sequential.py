"""The adapter of experts that run one after the other, each with a linear of its own (``SequentialMLP``)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_mcore_lora.adapters.factors import Factors
from lightning_mcore_lora.adapters.layer import LoRAAdapter


class SequentialAdapter(LoRAAdapter):
    """One adapter for the same linear of every expert of a layer; its factors are taken apart once in a forward.

    It sits where a grouped linear would have it, ``experts.linear_fc1.lora``, so that one name serves both.
    """

    _apart: Sequence[Factors | None] | None = None

    def attach(self) -> None:
        """Sit beside the experts."""
        site = self.site
        self.train(site.linear.training)
        for i, linear in enumerate(site.linears):
            method = getattr(linear, site.type.method)
            setattr(linear, site.type.method, functools.partial(self._run_expert, i, method))
        setattr(site.holder, site.leaf, nn.ModuleDict({"lora": self}))
        self._handles = (
            site.holder.register_forward_pre_hook(self._take_apart),
            site.holder.register_forward_hook(self._forget, always_call=True),
        )

    def detach(self) -> None:
        """Leave the experts as they were."""
        for linear in self.site.linears:
            delattr(linear, self.site.type.method)
        delattr(self.site.holder, self.site.leaf)
        for handle in self._handles:
            handle.remove()

    def _take_apart(self, *_: Any) -> None:
        """One node in the graph for all experts: their gradients come back in one piece."""
        count = self.site.experts
        if self.is_merged:
            self._apart = [None] * count
            return
        a, b, ratio = self._factors()
        a_each = a.unbind() if "a" in self.plan.each else (a,) * count
        b_each = b.unbind() if "b" in self.plan.each else (b,) * count
        ratios = (None,) * count if ratio is None else ratio.unbind()
        self._apart = [Factors(*each) for each in zip(a_each, b_each, ratios, strict=True)]

    def _forget(self, *_: Any) -> None:
        self._apart = None

    def forward(self, base: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Never called: each expert's linear runs with its own factors.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"{self.site.name}: {type(self).__name__} runs beside the experts, not by itself")

    def _run_expert(self, number: int, base: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._apart is None:
            raise RuntimeError(
                f"{self.site.name}: one expert was called by itself; call the {type(self.site.holder).__name__} that "
                "holds them all"
            )
        return self._run(self.site.linears[number], base, x, args, kwargs, self._apart[number])
