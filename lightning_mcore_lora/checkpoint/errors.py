"""Failing together: an error on one rank is an error on all."""

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
    mine = None if error is None else (str(error) or type(error).__name__)
    everyone: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    if any(failure is not None for failure in everyone):
        raise CheckpointError(f"{what}: {_joined(everyone)}") from error


def _joined(failures: list[str | None]) -> str:
    """Each failure once, with the ranks that had it where these are not all."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks.setdefault(failure, []).append(rank)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(failures):
        return next(iter(ranks))
    return "; ".join(f"{text} (rank {', '.join(map(str, which))})" for text, which in ranks.items())
