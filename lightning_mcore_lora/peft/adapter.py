"""An adapter as data: what is added to which parameter of a transformers model."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    r"""What is added to one parameter: :math:`s B A`.

    Args:
        a: ``[rank, d_in]``, or ``[experts, rank, d_in]``.
        b: ``[d_out, rank]``, or ``[experts, d_out, rank]``.
        alpha: The scale is ``alpha / rank``, with rsLoRA ``alpha / sqrt(rank)``.
        magnitude: ``[d_out]`` or ``[experts, d_out]`` with DoRA.
    """

    a: Tensor
    b: Tensor
    alpha: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Width of the factors."""
        return self.a.shape[-2]

    def scale(self, rslora: bool) -> float:
        """Factor s."""
        return self.alpha / (self.rank**0.5 if rslora else self.rank)

    def is_nothing(self) -> bool:
        """Whether both factors are zero: it adds nothing, and no gradient would change that."""
        return not (self.a.any() or self.b.any())


@dataclass(frozen=True)
class Adapter:
    """A whole adapter.

    Args:
        updates: By the name of the parameter in transformers' model.
        rslora: Whether scales are over the square root of the rank.
        dora: Whether there are magnitudes.
        dropout: Of the adapter's input in training.
        modules: Parameters that were trained in full, by name.
        copies: Parameters of the base that are in its files too.
    """

    updates: dict[str, Update]
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    modules: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)


def alike(updates: dict[str, Update], rslora: bool) -> dict[str, Update]:
    """The same updates with one rank and one alpha: factors padded with zeros, other scales taken into B."""
    rank = max(update.rank for update in updates.values())
    first = next(iter(updates.values()))
    alpha = first.alpha if first.rank == rank else first.scale(rslora) * (rank**0.5 if rslora else rank)
    scale = alpha / (rank**0.5 if rslora else rank)
    found = {}
    for name, update in updates.items():
        missing = rank - update.rank
        ratio = update.scale(rslora) / scale
        a = torch.nn.functional.pad(update.a, (0, 0, 0, missing)) if missing else update.a
        b = torch.nn.functional.pad(update.b, (0, missing)) if missing else update.b
        found[name] = replace(update, a=a, b=b if ratio == 1 else b.float() * ratio, alpha=alpha)
    return found
