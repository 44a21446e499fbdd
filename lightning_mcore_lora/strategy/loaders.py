"""Data loaders: ranks that begin and end together, and that continue in the middle of an epoch."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch, has_iterable_dataset
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, Sampler

from lightning_mcore_lora.parallel import ParallelContext
from lightning_mcore_lora.strategy import seeding

_END = object()


class DataLengthError(RuntimeError):
    """Ranks would take different numbers of steps."""


def share_out(loader: DataLoader, parallel: ParallelContext) -> None:
    """Make a loader's random draws right for a layout, in place.

    Worker processes are seeded by the data-parallel rank, so that tensor-parallel peers read and augment the same
    samples. A sampler of the user's, of which each data-parallel rank takes its part, draws the same order on all.
    """
    function = loader.worker_init_fn
    if isinstance(function, functools.partial) and function.func is pl_worker_init_function:
        loader.worker_init_fn = None  # Fabric's, by the global rank
    _auto_add_worker_init_fn(loader, parallel.dp_rank)
    if isinstance(loader.sampler, DistributedSamplerWrapper):
        wrapped: Any = loader.sampler.dataset
        if not isinstance(wrapped._sampler, _SameOrder):
            wrapped._sampler = _SameOrder(wrapped._sampler)
    if has_iterable_dataset(loader) and parallel.sizes.data > 1:
        rank_zero_warn(
            f"{type(loader.dataset).__name__} is an IterableDataset, which no sampler divides: each of the "
            f"{parallel.sizes.data} data-parallel ranks reads all of it, unless it takes every "
            "strategy.parallel.sizes.data-th sample, beginning with strategy.parallel.dp_rank"
        )


class _SameOrder(Sampler):
    """A sampler that draws from a seed which all ranks share, as it takes no generator of the loader's."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.base_seed() + self._epoch)
            return iter(list(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class EvenLoader:
    """A ``DataLoader`` whose epochs have the same number of batches on every rank.

    Lengths that are known are compared when an epoch begins. Where they are not, all ranks agree before each batch
    whether everyone has one, which costs a one-number collective a batch.

    Args:
        loader: The loader.
        device: Where to put the number.
    """

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet while copying
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._together(iter(self._loader))

    def _together(self, iterator: Iterator[Any]) -> Iterator[Any]:
        length = self._length()
        lengths = self._everyone(-1 if length is None else length)
        if len(set(lengths)) > 1:
            raise DataLengthError(
                f"batches of an epoch by rank: {lengths}. They must be equal (in training, and with expert parallelism "
                "always): use Lightning's distributed sampler, or divide the samples by "
                "strategy.distributed_sampler_kwargs, and pad or drop the last; predict pads nothing"
            )
        if length is not None or len(lengths) == 1:
            yield from iterator
            return
        while True:
            batch = next(iterator, _END)
            have = self._everyone(batch is not _END)
            if not all(have):
                if any(have):
                    ended = [rank for rank, has in enumerate(have) if not has]
                    rank_zero_warn(f"rank(s) {ended} ran out of data before others: the epoch ends here for all")
                return
            yield batch

    def _length(self) -> int | None:
        """Batches of an epoch, if that is sure."""
        try:
            return None if has_iterable_dataset(self._loader) else len(self._loader)
        except TypeError:
            return None

    def _everyone(self, number: int) -> list[int]:
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return [int(number)]
        mine = torch.tensor([int(number)], device=self._device)
        everyone = mine.new_empty(torch.distributed.get_world_size())
        torch.distributed.all_gather_into_tensor(everyone, mine)
        return everyone.tolist()


class ResumableLoader(EvenLoader):
    """Speaks Lightning's ``state_dict`` protocol for loaders that continue in the middle of an epoch.

    After a restart the batches that were consumed are drawn again, from the random state in which the epoch began, and
    dropped; then the random state of the checkpoint is put back. Order, augmentation and every later draw continue as
    if nothing had happened, with any dataset and sampler; the price is reading the consumed part of one epoch. At
    another data-parallel or batch size it continues after the same samples.

    Args:
        loader: The loader.
        device: See :class:`EvenLoader`.
        consumed: Tells how many batches of the current epoch have been used.
        replicas: Data-parallel size.
    """

    def __init__(self, loader: DataLoader, device: torch.device, consumed: Callable[[], int], replicas: int) -> None:
        super().__init__(loader, device)
        self._consumed = consumed
        # Of a batch sampler of the user's nobody knows how many samples make a batch.
        self._unit = (loader.batch_size or 1) * replicas
        self.skip = 0
        self.epoch_start: dict[str, Any] | None = None  # random state in which the current epoch began

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        if not skip:
            self.epoch_start = seeding.get_random_state()
            yield from self._together(iter(self._loader))
            return
        now = seeding.get_random_state()
        if self.epoch_start is not None:
            seeding.set_random_state(self.epoch_start)
        iterator = iter(self._loader)
        for _ in range(skip):
            next(iterator, None)
        seeding.set_random_state(now)
        yield from self._together(iterator)

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch: samples (of a batch sampler, batches) that all replicas together have read."""
        batches = self._consumed()
        return {"samples": 0 if batches == self._length() else batches * self._unit}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position; at an epoch's end that is the start of the next.

        Raises:
            ValueError: If batches of this size do not end there.
        """
        self.skip, rest = divmod(state["samples"], self._unit)
        if rest:
            raise ValueError(
                f"{state['samples']} samples of the epoch were read, and {self._unit} are read at once now (batch_size "
                "x data-parallel size): choose a batch_size that divides them, or resume at the epoch's start"
            )


class CountingLoader(ResumableLoader):
    """Counts its batches and epochs itself, where no trainer does; put it into the state that Fabric saves."""

    def __init__(self, loader: DataLoader, device: torch.device, replicas: int) -> None:
        super().__init__(loader, device, lambda: self._batches, replicas)
        # Fabric copies attributes from here; it asks for none.
        self.__dict__.update({name: value for name, value in vars(loader).items() if not name.startswith("_")})
        self._batches = 0
        self._epoch = -1

    def __iter__(self) -> Iterator[Any]:
        if not self.skip:
            self._epoch += 1
        self._batches = self.skip
        _set_sampler_epoch(self._loader, self._epoch)  # Fabric counts from zero again after a restart
        for batch in super().__iter__():
            self._batches += 1
            yield batch
        self._batches = 0  # the next epoch begins whole, however long this one was

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch, and which it is."""
        return super().state_dict() | {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        super().load_state_dict(state)
        self._epoch = state["epoch"]
