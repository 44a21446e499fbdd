"""What the memory monitor costs: ``python -m benchmarks.monitor --out FILE``.

A GPT model with adapters is trained by a Trainer, tensor-parallel over two processes (gloo), which logs every second
step. The time that ``MemoryMonitor`` spends in its hook, logging included, is taken in logged steps and in the others,
as a share of the step.
"""

import argparse
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.launch import hand_over, on_processes, save
from lightning_mcore_lora import LoRASPCallback, MCoreTP, MemoryMonitor, build_gpt_model

TP = 2
EVERY = 2
DEFAULT = 50  #: The Trainer's log_every_n_steps.
VOCABULARY = 512


class Timed(MemoryMonitor):
    """Takes the time of each hook."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.logged: list[float] = []
        self.others: list[float] = []

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        is_logged = trainer.global_step % EVERY == 0
        if is_logged:
            torch.distributed.barrier()  # a peer's delay is not the monitor's
        began = time.perf_counter()
        super().on_train_batch_end(trainer, pl_module, *args)
        (self.logged if is_logged else self.others).append(time.perf_counter() - began)


class Model(pl.LightningModule):
    """A GPT model of a given size, and the time of its steps."""

    def __init__(self, layers: int, hidden: int, sequence: int) -> None:
        super().__init__()
        self.sizes = layers, hidden, sequence
        self.model: Any = None
        self.starts: list[float] = []

    def configure_model(self) -> None:
        """Build it."""
        from megatron.core.transformer import TransformerConfig

        layers, hidden, sequence = self.sizes
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=2 * hidden,
            num_attention_heads=8,
            gated_linear_unit=True,
            add_bias_linear=False,
        )
        strategy: Any = self.trainer.strategy
        self.model = build_gpt_model(config, strategy.parallel, vocab_size=VOCABULARY, max_sequence_length=sequence)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One microbatch."""
        self.starts.append(time.perf_counter())
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1])[None].expand_as(inputs)
        return self.model(inputs, positions, None, labels=labels).mean()

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def worker(rank: int, folder: str, steps: int, layers: int, hidden: int, sequence: int) -> None:
    """Train and measure, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(TP)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    monitor, module = Timed(csv=f"{folder}/memory.csv"), Model(layers, hidden, sequence)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=TP,
        strategy=MCoreTP(tensor_parallel_size=TP),
        callbacks=[LoRASPCallback(verbose=False), monitor],
        max_steps=steps,
        log_every_n_steps=EVERY,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randint(0, VOCABULARY, (steps, sequence + 1))
    trainer.fit(module, DataLoader(data))  # type: ignore[arg-type]
    step = statistics.median(later - sooner for sooner, later in zip(module.starts, module.starts[1:], strict=False))
    logged, others = (statistics.median(times[1:]) for times in (monitor.logged, monitor.others))
    mean = (logged + (DEFAULT - 1) * others) / DEFAULT
    result = {
        "step_ms": 1e3 * step,
        "mean_ms": 1e3 * mean,
        "logged_step_ms": 1e3 * logged,
        "other_step_ms": 1e3 * others,
        "logged_over_step": logged / step,
        "other_over_step": others / step,
    }
    if rank == 0:
        shown = Table("MemoryMonitor", "ms", "share of a step", title_justify="left")
        shown.add_row("a logged step", f"{1e3 * logged:.3f}", f"{logged / step:.2%}")
        shown.add_row("another step", f"{1e3 * others:.4f}", f"{others / step:.3%}")
        shown.add_row(f"a step, if one in {DEFAULT} is logged", f"{1e3 * mean:.4f}", f"{mean / step:.3%}")
        Console().print(shown)
    hand_over(rank, folder, [result])


def main() -> None:
    """Run the benchmark and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    given = parser.parse_args()
    results = on_processes(TP, worker, given.steps, given.layers, given.hidden, given.sequence)
    save(given.out, {"tensor_parallel_size": TP, "log_every_n_steps": EVERY}, results)


if __name__ == "__main__":
    main()
