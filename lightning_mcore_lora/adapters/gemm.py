"""Products with one weight, or with each expert's own for its tokens. One backend of the latter is one row.

Tokens are sorted by expert; ``sizes`` are the numbers of tokens of each, which Megatron-Core has on the host already.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Sizes = Sequence[int] | None


@dataclass(frozen=True)
class Backend:
    """One way to multiply tokens with their experts' weights; all give the same.

    Args:
        can: ``can(x, w, sizes)`` says whether it takes these.
        times: ``x_e w_e^T`` of each expert e: ``[tokens, k]`` and ``[experts, m, k]`` to ``[tokens, m]``.
        outer: ``y_e^T x_e``: ``[tokens, m]`` and ``[tokens, k]`` to ``[experts, m, k]``.
        add_times: Adds ``times(x, w)`` to its first argument in place.
    """

    can: Callable[[Tensor, Tensor, Sequence[int]], bool]
    times: Callable[[Tensor, Tensor, Sequence[int]], Tensor]
    outer: Callable[[Tensor, Tensor, Sequence[int]], Tensor]
    add_times: Callable[[Tensor, Tensor, Tensor, Sequence[int]], object]


# -- torch's kernel for groups of any sizes ------------------------------------------------------------------------


def _can_group(x: Tensor, w: Tensor, sizes: Sequence[int]) -> bool:
    if not hasattr(torch.nn.functional, "grouped_mm") or len(x) == 0:
        return False
    if x.device.type == "cuda":
        fits = x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    else:
        fits = x.dtype in (torch.bfloat16, torch.float32)
    return fits and all(width * x.element_size() % 16 == 0 for width in (x.shape[-1], *w.shape[-2:]))


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32).to(device, non_blocking=True)


def _grouped_times(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.nn.functional.grouped_mm(x.contiguous(), w.mT, offs=_ends(sizes, x.device))


def _grouped_outer(y: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.nn.functional.grouped_mm(y.contiguous().mT, x.contiguous(), offs=_ends(sizes, x.device))


# -- one batched product for groups of one size, as with padding to capacity ---------------------------------------


def _batch(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.view(len(sizes), sizes[0], x.shape[-1])


# -- one product after the other -----------------------------------------------------------------------------------


def _looped_times(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.cat([tokens @ weight.T for tokens, weight in zip(x.split(list(sizes)), w, strict=True)])


def _looped_outer(y: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    pairs = zip(y.split(list(sizes)), x.split(list(sizes)), strict=True)
    return torch.stack([left.T @ right for left, right in pairs])


def _looped_add(output: Tensor, x: Tensor, w: Tensor, sizes: Sequence[int]) -> None:
    parts = zip(output.split(list(sizes)), x.split(list(sizes)), w, strict=True)
    for part, tokens, weight in parts:
        part.addmm_(tokens, weight.T)


#: The first that takes a product does it.
BACKENDS: dict[str, Backend] = {
    "grouped_mm": Backend(
        _can_group,
        _grouped_times,
        _grouped_outer,
        lambda output, x, w, sizes: output.add_(_grouped_times(x, w, sizes)),
    ),
    "batched": Backend(
        lambda x, w, sizes: len(set(sizes)) == 1 and x.is_contiguous(),
        lambda x, w, sizes: (_batch(x, sizes) @ w.mT).flatten(0, 1),
        lambda y, x, sizes: _batch(y, sizes).mT @ _batch(x, sizes),
        lambda output, x, w, sizes: _batch(output, sizes).baddbmm_(_batch(x, sizes), w.mT),
    ),
    "looped": Backend(lambda x, w, sizes: True, _looped_times, _looped_outer, _looped_add),
}


def _backend(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Backend:
    return next(backend for backend in BACKENDS.values() if backend.can(x, w, sizes))


def times(x: Tensor, w: Tensor, sizes: Sizes = None) -> Tensor:
    """``x w^T``.

    Args:
        x: ``[..., k]``; ``[tokens, k]`` if ``w`` is of several experts.
        w: ``[m, k]``, or ``[experts, m, k]``.
        sizes: Tokens of each expert.

    Returns:
        ``[..., m]``.
    """
    if w.dim() == 2:
        return x @ w.T
    assert sizes is not None
    return _backend(x, w, sizes).times(x, w, sizes)


def outer(y: Tensor, x: Tensor, like: Tensor, sizes: Sizes = None) -> Tensor:
    """``y^T x`` over all tokens, or over those of each expert.

    Args:
        y: ``[..., m]``.
        x: ``[..., k]``.
        like: A weight ``[m, k]`` or ``[experts, m, k]``, whose gradient it is.
        sizes: Tokens of each expert.
    """
    if like.dim() == 2:
        return _flat(y).T @ _flat(x)
    assert sizes is not None
    return _backend(x, like, sizes).outer(y, x, sizes)


def add_times(output: Tensor, x: Tensor, w: Tensor, sizes: Sizes = None) -> None:
    """Add :func:`times` to ``output``, which is contiguous, in place."""
    if w.dim() == 2:
        output.view(-1, output.shape[-1]).addmm_(_flat(x), w.T)
        return
    assert sizes is not None
    _backend(x, w, sizes).add_times(output, x, w, sizes)


def _flat(tensor: Tensor) -> Tensor:
    """All tokens in one dimension."""
    return tensor.reshape(-1, tensor.shape[-1])
