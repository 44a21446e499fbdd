"""Count what a step keeps and sends, exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Passes over its largest tensor that a collective makes; each sends ``(n - 1) / n`` of it from each of n ranks.
_PASSES = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2, "allreduce_coalesced_": 2}


class Collective(NamedTuple):
    """One collective over more than one process.

    Args:
        name: The operator.
        elements: Elements of its largest tensor, if those are activations; weights go flat, and count 0.
        sent: Bytes that this rank sends.
    """

    name: str
    elements: int
    sent: float


class Collectives(TorchDispatchMode):
    """Records the collectives that run inside, those of one process left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            size = next(n for leaf in leaves if (n := _group_size(leaf)) is not None)
            if size > 1:
                name = func.__name__.partition(".")[0]
                largest = max((leaf for leaf in leaves if isinstance(leaf, Tensor)), key=Tensor.numel)
                sent = _PASSES[name] * largest.nbytes * (size - 1) / size
                self.seen.append(Collective(name, largest.numel() * (largest.dim() > 1), sent))
        return func(*args, **(kwargs or {}))

    def wide(self, elements: int) -> int:
        """Number of collectives of activations of at least so many elements."""
        return sum(collective.elements >= elements for collective in self.seen)

    def sent(self) -> int:
        """Bytes that this rank sends."""
        return round(sum(collective.sent for collective in self.seen))


def _group_size(argument: Any) -> int | None:
    if not isinstance(argument, torch.ScriptObject) or "ProcessGroup" not in str(argument._type()):
        return None
    return torch.distributed.ProcessGroup.unbox(argument).size()


@contextmanager
def kept_for_backward(but: set[int]) -> Iterator[Callable[[], int]]:
    """Bytes of the distinct storages that graphs made inside keep alive, measured when asked, after forward.

    Args:
        but: Addresses of storages that do not count: parameters, buffers.
    """
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def count() -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        return sum(size for pointer, size in storages.items() if pointer not in but)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count
