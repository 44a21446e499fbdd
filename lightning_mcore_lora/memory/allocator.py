"""What torch's CUDA allocator was told, and what it uses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

#: Environment variables with its settings, in the order in which CUDA looks for them: one that is there counts, even
#: if it is empty, and the other is not read.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: The first torch whose CUDA allocator reads the second of them.
READS_BOTH = (2, 11)


def parse_settings(text: str) -> dict[str, str]:
    """Split ``option:value,option:[a:1,b:2]`` into options and values; of an option given twice the last counts.

    Args:
        text: The content of a variable. Spaces do not matter.
    """
    options: dict[str, str] = {}
    depth, item = 0, ""
    for letter in f"{text},":
        if letter == "," and not depth:
            name, _, value = item.partition(":")
            if name:
                options[name] = value
            item = ""
        elif not letter.isspace():
            depth += (letter == "[") - (letter == "]")
            item += letter
    return options


def variable_read(environ: Mapping[str, str], version: tuple[int, int]) -> str | None:
    """The variable that CUDA takes its settings from, or ``None``.

    Args:
        environ: The environment.
        version: torch's.
    """
    names = VARIABLES if version >= READS_BOTH else VARIABLES[:1]
    return next((name for name in names if name in environ), None)


def requested(environ: Mapping[str, str], version: tuple[int, int]) -> dict[str, str]:
    """The settings with which CUDA starts in this environment."""
    name = variable_read(environ, version)
    return {} if name is None else parse_settings(environ[name])


@dataclass(frozen=True)
class Running:
    """The allocator of this process.

    Args:
        expandable_segments: Whether new segments can grow.
        settings: What it was told, as it read it when CUDA started; ``None`` if this torch does not say.
        user_pools: Pools that were made as ``torch.cuda.MemPool`` and hold memory.
    """

    expandable_segments: bool
    settings: dict[str, str] | None
    user_pools: int = 0


def running() -> Running | None:
    """The allocator of this process; ``None`` before CUDA has started, or if it says nothing of itself."""
    if not torch.cuda.is_initialized():
        return None
    try:
        snapshot = torch.cuda.memory._snapshot()
    except RuntimeError:  # another backend, cudaMallocAsync
        return None
    told = snapshot.get("allocator_settings", {})
    if "expandable_segments" not in told:
        return None
    # A pool's id is (number, 0) if a graph's capture made it, and (0, number) if a user did.
    pools = {tuple(segment.get("segment_pool_id", (0, 0))) for segment in snapshot["segments"]}
    text = told.get("PYTORCH_CUDA_ALLOC_CONF")
    return Running(
        bool(told["expandable_segments"]),
        None if text is None else parse_settings(text),
        sum(first == 0 and second > 0 for first, second in pools),
    )
