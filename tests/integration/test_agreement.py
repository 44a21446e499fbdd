"""Processes that were started with different code or settings say so, all of them, before they wait for each other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore_lora import LoRASPCallback, MCoreTP
from lightning_mcore_lora.strategy import agreement
from tests import runs, tiny
from tests.integration.test_precision import Unfreeze
from tests.workers import WorkerError, WorkerPool


def _start(directory: str, case: str) -> None:
    odd = torch.distributed.get_rank() == 1
    options: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if case == "code" and odd:
            patch.setattr(agreement, "_package_hash", lambda: "other")
        if case == "steps" and odd:
            options["max_steps"] = 3
        strategy = MCoreTP(tensor_parallel_size=1 if case == "sizes" and odd else 2)
        lora = LoRASPCallback(rank=8 if case == "rank" and odd else 4, verbose=False)
        module = runs.TinyModule(directory, random_factors=False)
        if case == "rate" and odd:
            module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5)  # type: ignore
        elif case == "rate":
            module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.25)  # type: ignore
        callbacks = (lora, Unfreeze()) if case == "frozen" and odd else (lora,)
        runs.trainer(strategy, None, callbacks=callbacks, **options).fit(module)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("code", "lightning_mcore_lora code is '.*' on rank 0, but rank 1: 'other'"),
        ("sizes", "tensor is 2 on rank 0, but rank 1: 1"),
        ("rank", r"adapters is .* on rank 0, but rank 1"),
        ("frozen", r"number of trainable parameters is \d+ on rank 0, but rank 1: \d+"),
        ("steps", f"max_steps is {tiny.STEPS} on rank 0, but rank 1: 3"),
        ("rate", r"its settings is .*'lr': 0.25.* on rank 0, but rank 1: .*'lr': 0.5"),
    ],
)
def test_differences_are_named_on_every_rank(workers: WorkerPool, tiny_llama: Path, case: str, match: str) -> None:
    everywhere = ".*".join(f"rank {rank}: DisagreementError.*{match}" for rank in (0, 1))
    with pytest.raises(WorkerError, match=f"(?s){everywhere}"):
        workers(2, _start, str(tiny_llama), case)
