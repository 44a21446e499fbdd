"""Processes that save again and again until they are killed, at a random moment inside a save."""

import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.workers import PRELOAD

ROWS, WIDTH, WORLD = 512, 1024, 2
#: In the shared array: whether rank zero is inside a save, and the last generation that it has saved.
INSIDE, SAVED = 0, 1


class Weights(nn.Module):
    """One sharded weight, one that each rank has, and a buffer, all filled with the generation's number."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.sharded: Any = nn.Parameter(torch.zeros(ROWS // shards, WIDTH))
        self.sharded.tensor_model_parallel, self.sharded.partition_dim = True, 0
        self.whole = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(3))

    def fill(self, generation: int) -> None:
        """Set everything."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(generation)


def optimizer_of(module: Weights, generation: int) -> torch.optim.Optimizer:
    """Adam, its moments filled with the generation's number."""
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        moments = {key: torch.full_like(parameter, generation) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = moments | {"step": torch.tensor(float(generation))}
    return optimizer


def engine(tensor_parallel_size: int, world: int, **settings: Any) -> Any:
    """An engine whose groups exist."""
    from lightning_mcore_lora.strategy.engine import Engine

    short = timedelta(seconds=5)
    started = Engine(tensor_parallel_size, False, 1, 1, timedelta(seconds=20), short, **settings)
    started.start(world)
    return started


def _save_for_ever(rank: int, port: int, out: str, replace: bool, exchange: bool, shared: Any, settings: Any) -> None:
    with open(f"{out}/rank-{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not exchange:
        from lightning_mcore_lora.checkpoint import place

        place._exchange = lambda *_: False
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    try:
        saver = engine(WORLD, WORLD, **settings)
        module = Weights(WORLD)
        for generation in range(1, 10_000):
            module.fill(generation)
            if rank == 0:
                shared[INSIDE] = 1
            name = "last.ckpt" if replace else f"step={generation}.ckpt"
            optimizers = [optimizer_of(module, generation)]
            saver.save(f"{out}/{name}", {"generation": generation}, saver.tensors(module), optimizers, [])
            if rank == 0:
                # In the background the one before is complete when the next begins.
                shared[INSIDE], shared[SAVED] = 0, generation - bool(settings.get("async_save"))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type] # as the end of a script does
        sys.stderr.flush()
        os._exit(1)


def kill_while_saving(
    out: Path, seed: int, port: int, replace: bool, exchange: bool = True, settings: Any = None
) -> tuple[int, list[int], list[str]]:
    """Start the processes, kill one or all of them inside a save, and wait for the rest to end.

    Returns:
        The last generation that was saved before, the ranks that were killed, and what each process printed.
    """
    chance = random.Random(seed)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    shared = context.Array("i", 2, lock=False)
    processes = [
        context.Process(target=_save_for_ever, args=(rank, port, str(out), replace, exchange, shared, settings or {}))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + 60
        while shared[SAVED] < 2:
            assert time.monotonic() < deadline, [(out / f"rank-{rank}.txt").read_text() for rank in range(WORLD)]
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)
        while not shared[INSIDE]:
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.05)  # a save takes about as long
        while not shared[INSIDE]:
            pass
        saved = shared[SAVED]
        victims = chance.choice([[0], [1], [0, 1]])
        for victim in victims:
            os.kill(processes[victim].pid, signal.SIGKILL)  # type: ignore[arg-type]
        for process in processes:
            process.join(30)
            assert process.exitcode not in (None, 0), "a process that is left behind hangs"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return saved, victims, [(out / f"rank-{rank}.txt").read_text() for rank in range(WORLD)]


def read(path: str) -> dict[str, Any]:
    """Load a checkpoint in one process; every value must be of one generation."""
    reader = engine(1, 1)
    try:
        module = Weights(1)
        optimizer = optimizer_of(module, 0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loaded = reader.load(path, reader.tensors(module), [optimizer])
        values = {int(value) for tensor in loaded.weights.values() for value in tensor.unique()}
        for entry in loaded.optimizer_states[0]["state"].values():
            values |= {int(value) for tensor in entry.values() for value in tensor.unique()}
        return {
            "generation": loaded.rest["generation"],
            "values": values,
            "said": [str(warning.message) for warning in said],
        }
    finally:
        reader.stop()
