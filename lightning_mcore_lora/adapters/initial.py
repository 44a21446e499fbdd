"""Initial A: drawn whole, over the full input, the same on every rank and at every layout."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_mcore_lora.adapters.sites import Site


def _kaiming(a: Tensor, generator: torch.Generator) -> None:
    # Kaiming-uniform with a=sqrt(5), as PEFT's default.
    bound = a.shape[1] ** -0.5
    a.uniform_(-bound, bound, generator=generator)


def _xavier(a: Tensor, generator: torch.Generator) -> None:
    bound = (6 / sum(a.shape)) ** 0.5
    a.uniform_(-bound, bound, generator=generator)


def _gaussian(a: Tensor, generator: torch.Generator) -> None:
    a.normal_(0, 1 / a.shape[0], generator=generator)


#: One row for each value of ``LoRAConfig.init``.
INITIAL: dict[str, Callable[[Tensor, torch.Generator], None]] = {
    "kaiming": _kaiming,
    "xavier": _xavier,
    "gaussian": _gaussian,
}


def initial_a(site: Site, rank: int, init: str, seed: int, parts: tuple[str, ...] = ("",)) -> Tensor:
    """The whole A of a site, ``[len(parts) * rank, d_in]``, in float32; each part is drawn for itself."""
    drawn = []
    for part in parts:
        name = f"{site.name}.{part}" if part else site.name
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        a = torch.empty(rank, site.d_in, dtype=torch.float32)
        INITIAL[init](a, generator)
        drawn.append(a)
    return torch.cat(drawn)
