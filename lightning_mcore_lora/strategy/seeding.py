"""Random streams: equal where peers see the same tokens, different where they do not."""

import hashlib
import os
import random
from typing import Any, cast

import numpy as np
import torch
from megatron.core.tensor_parallel import random as mcore_random

from lightning_mcore_lora.checkpoint.process_state import Origin
from lightning_mcore_lora.parallel import ParallelContext

DEFAULT_SEED = 42
_DATA_PARALLEL = mcore_random._DATA_PARALLEL_RNG_TRACKER_NAME
_APART = 1_000_003  # more than the offsets that Megatron-Core adds for its streams


def base_seed() -> int:
    """The seed of ``seed_everything``, or a fixed one: without any, ranks would draw different weights."""
    return int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))


def seed_for_init() -> None:
    """Streams for building a model: replicas must start from the same weights."""
    _seed(base_seed())


def seed_for_training(parallel: ParallelContext) -> None:
    """Streams for training: tensor-parallel peers share the default stream, data-parallel replicas differ."""
    _seed(base_seed() + _APART * parallel.dp_rank)


def _seed(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)
    mcore_random.model_parallel_cuda_manual_seed(seed)


def get_random_state() -> dict[str, Any]:
    """State of every random stream of this process, as tensors and plain numbers."""
    kind, keys, *rest = cast(tuple, np.random.get_state())
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "mcore": dict(mcore_random.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: dict[str, Any]) -> None:
    """Put back what :func:`get_random_state` gave."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    mcore_random.get_cuda_rng_tracker().set_states(dict(states["mcore"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def continue_from(states: dict[str, Any], origin: Origin, parallel: ParallelContext) -> None:
    """Put a checkpoint's streams back, as far as they have a meaning at this layout; the others begin anew.

    A new beginning is the same on every tensor-parallel peer, and another at every step.

    Args:
        states: What :func:`get_random_state` gave on the rank that saved them.
        origin: Which of them continue.
        parallel: The layout.
    """
    if origin.shared and origin.own:
        set_random_state(states)
        return
    digest = hashlib.sha256(states["torch"].numpy().tobytes()).digest()
    _seed(int.from_bytes(digest[:4], "little") + _APART * parallel.dp_rank)
    if origin.shared:
        sharded = {k: v for k, v in mcore_random.get_cuda_rng_tracker().get_states().items() if k != _DATA_PARALLEL}
        set_random_state(states | {"mcore": states["mcore"] | sharded})
