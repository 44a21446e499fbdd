"""Processes that fail on purpose: at one place, in one way, on one rank; and what the others then do."""

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from lightning_mcore_lora import LoRASPCallback, MCoreTP
from tests import runs, tiny
from tests.workers import PRELOAD

PLACES = ("forward", "backward", "collective", "load")
KINDS = ("raise", "kill", "exit", "hang")
TIMEOUT, PEER_TIMEOUT = timedelta(seconds=5), timedelta(seconds=3)
STEP = 2


def fail(kind: str) -> None:
    """Fail now."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(1000)
    elif kind == "exit":
        raise SystemExit(3)
    else:
        raise ZeroDivisionError("on purpose")


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        fail(ctx.kind)


class Samples(torch.utils.data.Dataset):
    """Fails at one sample."""

    def __init__(self, at: int, kind: str | None) -> None:
        self.at, self.kind, self.read = at, kind, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        self.read += 1
        if self.kind and self.read > self.at:
            fail(self.kind)
        return tiny.tokens()[i % len(tiny.tokens())]


class Module(pl.LightningModule):
    """Trains until its time to fail has come; ``kind`` is ``None`` on the ranks that do not."""

    def __init__(self, directory: str, place: str, kind: str | None) -> None:
        super().__init__()
        self.directory, self.place, self.kind = directory, place, kind
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = runs.build_gpt_model(self.directory, self.trainer.strategy.parallel)

    def training_step(self, samples: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return step(self.model, samples, self.place, self.kind if batch_idx == STEP else None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        kind = self.kind if self.place == "load" else None
        return torch.utils.data.DataLoader(Samples(2 * STEP, kind), batch_size=2)


def step(model: Any, samples: torch.Tensor, place: str, kind: str | None) -> torch.Tensor:
    """One loss, in which a rank may fail."""
    if kind and place == "forward":
        layer = model.decoder.layers[1]
        layer.register_forward_pre_hook(lambda *args: fail(kind))
    if kind and place == "collective":

        def all_reduce(*args: Any, **kwargs: Any) -> None:
            fail(kind)

        torch.distributed.all_reduce = all_reduce  # type: ignore[assignment]
    loss = runs.token_losses(model, samples).mean()
    return _FailInBackward.apply(loss, kind) if kind and place == "backward" else loss


def _with_trainer(directory: str, tp: int, place: str, kind: str | None) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MCoreTP(tensor_parallel_size=tp, timeout=TIMEOUT, peer_timeout=PEER_TIMEOUT),
        callbacks=[LoRASPCallback(rank=4, verbose=False)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(directory, place, kind))


def _with_fabric(directory: str, tp: int, place: str, kind: str | None) -> None:
    from lightning.fabric import Fabric

    strategy = MCoreTP(tensor_parallel_size=tp, timeout=TIMEOUT, peer_timeout=PEER_TIMEOUT)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    model = runs.build_gpt_model(directory, strategy.parallel)
    runs.apply_lora(model, runs.LoRAConfig(rank=4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = Samples(2 * STEP, kind if place == "load" else None)
    for i, batch in enumerate(fabric.setup_dataloaders(torch.utils.data.DataLoader(samples, batch_size=2))):
        fabric.backward(step(model, batch, place, kind if i == STEP else None))
        optimizer.step()
        optimizer.zero_grad()


def _child(rank: int, world: int, port: int, out: str, face: str, args: tuple, fails: bool, kind: str) -> None:
    os.setsid()  # its own session: an orphan would show in it
    with open(f"{out}-{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PL_GLOBAL_SEED": "7"}
    try:
        (_with_fabric if face == "fabric" else _with_trainer)(*args, kind if fails else None)
    except SystemExit:
        raise  # no hook hears of it
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type] # as the end of a script does
        sys.stderr.flush()
        os._exit(1)


def run(
    directory: Path, out: Path, *, world: int, tp: int, place: str, kind: str, failing: int, face: str, port: int
) -> tuple[list[BaseProcess], list[str], float]:
    """Train in fresh processes, of which one fails.

    Returns:
        The processes, what each printed, and how long it took until the last that was not frozen had ended.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    args = (str(directory), tp, place)
    processes = [
        context.Process(target=_child, args=(rank, world, port, str(out), face, args, rank == failing, kind))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    begin = time.monotonic()
    sessions = [process.pid for process in processes]
    try:
        for rank, process in enumerate(processes):
            if not (kind == "freeze" and rank == failing):
                process.join(60)
        elapsed = time.monotonic() - begin
        left = [p for p in psutil.process_iter(["pid"]) if _session(p.pid) in sessions]
        expected = {processes[failing].pid} if kind == "freeze" else set()
        assert {p.pid for p in left if p.status() != psutil.STATUS_ZOMBIE} == expected, left
    finally:
        for process in processes:
            process.kill()
            process.join()
    return processes, [Path(f"{out}-{rank}.txt").read_text() for rank in range(world)], elapsed


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
