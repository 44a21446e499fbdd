"""When one process fails, every other ends soon and says which one it was; nothing is left running."""

import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore_lora import MCoreTP
from lightning_mcore_lora.strategy.watch import PATIENCE_S
from tests import faults, runs
from tests.launch import free_port
from tests.workers import WorkerPool

LIMIT_S = 30
#: (world, TP, failing rank) of each combination of place and kind, in turn.
LAYOUTS = [(2, 2, 1), (2, 1, 0), (2, 2, 0)]
COMBINATIONS = [
    (place, kind, *layout, face)
    for (place, kind), (layout, face) in itertools.product(
        itertools.product(faults.PLACES, faults.KINDS), zip(LAYOUTS, ("trainer", "trainer", "fabric"), strict=True)
    )
] + [("forward", "freeze", 2, 2, 1, "trainer"), ("backward", "kill", 4, 2, 2, "trainer")]
QUICK = {
    ("forward", "raise", 2, 2, 1, "trainer"),
    ("backward", "kill", 2, 1, 0, "trainer"),
    ("load", "exit", 2, 2, 1, "trainer"),
    ("load", "raise", 2, 2, 0, "fabric"),
}


def test_there_are_fifty() -> None:
    assert len(COMBINATIONS) == 50
    assert len(QUICK & set(COMBINATIONS)) == len(QUICK)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.full, id="-".join(map(str, c))) for c in COMBINATIONS],
)
def test_all_end_and_say_why(tiny_llama: Path, tmp_path: Path, fault: Any) -> None:
    place, kind, world, tp, failing, face = fault
    processes, outputs, elapsed = faults.run(
        tiny_llama,
        tmp_path / "out",
        world=world,
        tp=tp,
        place=place,
        kind=kind,
        failing=failing,
        face=face,
        port=free_port(),
    )
    assert elapsed < LIMIT_S
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if rank == failing and kind in ("kill", "freeze"):
            continue
        assert process.exitcode not in (0, -9), (rank, process.exitcode, output[-2000:])
        reason = rf"rank {failing}\b" if kind != "hang" else rf"(rank {failing}\b|ran into its time-out|imed out)"
        if rank != failing:
            assert re.search(reason, output), output[-2000:]
        elif kind == "raise":
            assert "ZeroDivisionError: on purpose" in output


class Fails(runs.TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ZeroDivisionError("on purpose")


class Slow(runs.TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(PATIENCE_S / 2)
        return super().training_step(batch, batch_idx)


def _twice(directory: str) -> int:
    with pytest.raises(ZeroDivisionError):
        runs.trainer(MCoreTP(2), "local").fit(Fails(directory))
    again = runs.trainer(MCoreTP(2), "local", max_steps=3, accumulate_grad_batches=1)
    again.fit(Slow(directory))
    return again.global_step


@pytest.mark.full
def test_a_failure_that_was_caught_is_over(workers: WorkerPool, tiny_llama: Path) -> None:
    assert workers(2, _twice, str(tiny_llama)) == [3, 3]
