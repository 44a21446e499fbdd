"""Initial A: drawn whole, over the full input, the same on every rank and at every layout."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_mcore_lora.adapters.experts import local_experts
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


def initial_a(
    site: Site, rank: int, init: str, seed: int, parts: tuple[str, ...] = ("",), each: bool = False
) -> Tensor:
    """The whole A of a site, ``[len(parts) * rank, d_in]``, in float32; each part is drawn for itself.

    With ``each`` it is ``[experts, ...]``, of this rank's experts, each drawn by its number over all ranks.
    """
    if each:
        names = [f"{site.name}.{number}" for number in local_experts(site)]
        return torch.stack([_whole(name, site, rank, init, seed, parts) for name in names])
    return _whole(site.name, site, rank, init, seed, parts)


def _whole(name: str, site: Site, rank: int, init: str, seed: int, parts: tuple[str, ...]) -> Tensor:
    drawn = []
    for part in parts:
        full_name = f"{name}.{part}" if part else name
        generator = torch.Generator().manual_seed(zlib.crc32(full_name.encode()) + seed)
        a = torch.empty(rank, site.d_in, dtype=torch.float32)
        INITIAL[init](a, generator)
        drawn.append(a)
    return torch.cat(drawn)
