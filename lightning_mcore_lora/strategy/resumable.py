"""A data loader that continues in the middle of an epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_mcore_lora.strategy.seeding import get_random_state, set_random_state


class ResumableLoader:
    """Wraps a ``DataLoader`` and speaks Lightning's ``state_dict`` protocol for loaders.

    After a restart the batches that were consumed are drawn again, from the random state in which the epoch began, and
    dropped; then the random state of the checkpoint is put back. Order, augmentation and every later draw continue as
    if nothing had happened, with any dataset and sampler; the price is reading the consumed part of one epoch.

    Args:
        loader: The loader.
        consumed: Tells how many batches of the current epoch have been used.
    """

    def __init__(self, loader: DataLoader, consumed: Callable[[], int]) -> None:
        self._loader = loader
        self._consumed = consumed
        self._skip = 0
        self.epoch_start: dict[str, Any] | None = None  # random state in which the current epoch began

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet while copying
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        if not skip:
            self.epoch_start = get_random_state()
            yield from self._loader
            return
        now = get_random_state()
        if self.epoch_start is not None:
            set_random_state(self.epoch_start)
        iterator = iter(self._loader)
        for _ in range(skip):
            next(iterator, None)
        set_random_state(now)
        yield from iterator

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch."""
        return {"batches": self._consumed()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position; at an epoch's end that is the start of the next."""
        self._skip = state["batches"]
        try:
            self._skip %= max(1, len(self))
        except TypeError:  # an iterable dataset without a length
            return
