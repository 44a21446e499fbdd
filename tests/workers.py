"""Worker processes that tests share.

One pool of processes serves every world size: a call takes the first ``n`` workers, gives them a fresh default process
group, runs a function on each and returns what it returned, by rank. Workers are forked from a server that has imported
the libraries once, so a whole test run pays for the imports once.
"""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = ["tests.preload"]
TIMEOUT_S = 120
#: Called when a worker has run its function: what the function started and nothing else ends.
AT_END: list[Callable[[], None]] = []


class WorkerError(AssertionError):
    """A function failed on at least one rank; carries the tracebacks."""


def _serve(rank: int, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the tests have ended
            return
        function, args, kwargs, world_size, rendezvous = task
        connection.send(_run(rank, function, args, kwargs, world_size, rendezvous))


def _run(rank: int, function: Callable, args: tuple, kwargs: dict, world_size: int, rendezvous: str) -> tuple:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from lightning_mcore_lora import cpu_backend

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "PL_GLOBAL_SEED": "7"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # Lightning reads them, but the group stands already
    torch.manual_seed(7)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
    except RuntimeError as error:
        return None, f"rank {rank} did not meet the others: {error}"
    try:
        return True, function(*args, **kwargs)
    except BaseException as error:
        return False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        while AT_END:
            AT_END.pop()()
        while cpu_backend.is_active():
            cpu_backend.undo()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        # Groups that live on keep their threads: those in cycles, and the last ones in Megatron-Core's cache.
        RotaryEmbedding.forward.cache_clear()
        gc.collect()


class WorkerPool:
    """Processes by rank, started when first needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._calls = 0

    def __call__(self, world_size: int, function: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on ``world_size`` ranks and return the results by rank.

        Raises:
            WorkerError: If any rank raised, or did not answer in time (the pool is then started anew).
        """
        answers = self._ask(world_size, function, args, kwargs)
        if any(ok is None for ok, _ in answers):
            # Gloo sometimes loses a connection while processes meet. Nothing has run by then: new ones meet once more.
            self.close()
            answers = self._ask(world_size, function, args, kwargs)
        failures = [message for ok, message in answers if not ok]
        if failures:
            raise WorkerError("\n".join(failures))
        return [result for _, result in answers]

    def _ask(self, world_size: int, function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[tuple]:
        """Whether each rank's function returned (``None``: it never began), and what it returned or raised."""
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            # Not daemons, which may not have children: Megatron-Core's checkpoint writer forks.
            process = self._context.Process(target=_serve, args=(len(self._workers), theirs), daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._calls += 1
        rendezvous = str(Path(self._folder.name) / f"store-{self._calls}")
        for _, connection in self._workers[:world_size]:
            connection.send((function, args, kwargs, world_size, rendezvous))
        answers = []
        for rank, (process, connection) in enumerate(self._workers[:world_size]):
            if not connection.poll(TIMEOUT_S):
                self.close()
                raise WorkerError(f"rank {rank} gave no answer within {TIMEOUT_S} s; alive: {process.is_alive()}")
            try:
                answers.append(connection.recv())
            except EOFError:
                self.close()
                raise WorkerError(f"rank {rank} died") from None
        return answers

    def close(self) -> None:
        """End every worker."""
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []
