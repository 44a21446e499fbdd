"""Failing together: an error on one rank is an error on all."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the run that reads it."""


@contextmanager
def together(what: str) -> Iterator[None]:
    """Around what each rank does for itself, without collectives; ends when all have done it.

    Args:
        what: What is done, for the message.

    Raises:
        CheckpointError: On every rank, if it failed on any.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    mine = None if error is None else reason(error)
    everyone: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    if any(failure is not None for failure in everyone):
        raise CheckpointError(f"{what}: {_joined(everyone)}") from error


def reason(error: BaseException) -> str:
    """What the system said first; torch's advice to trust a file that runs code is left out."""
    while error.__cause__ is not None and not isinstance(error, CheckpointError):
        error = error.__cause__
    if isinstance(error, pickle.UnpicklingError):
        return "it holds more than plain data and tensors, which is never read: it was tampered with, or not saved here"
    return str(error) or type(error).__name__


def _joined(failures: list[str | None]) -> str:
    """Each failure once, with the ranks that had it where these are not all."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks.setdefault(failure, []).append(rank)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(failures):
        return next(iter(ranks))
    return "; ".join(f"{text} (rank {', '.join(map(str, which))})" for text, which in ranks.items())
