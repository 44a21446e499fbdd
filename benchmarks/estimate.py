"""Estimates beside what a run takes: ``python -m benchmarks.estimate --out FILE``.

A Trainer takes a few steps with a GPT model and adapters, for each case in a process of its own, on one CUDA device if
there is one and on the CPU otherwise. Measured are ``torch.cuda.max_memory_allocated``, or how much the CPU's resident
set grew, which is rough: temporaries are in it, and its allocator keeps what was freed.
"""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.launch import hand_over, on_processes, save
from lightning_mcore_lora import LoRASPCallback, MCoreTP, build_gpt_model
from lightning_mcore_lora.memory.observed import Observed
from lightning_mcore_lora.memory.readings import peak_rss

STEPS = 3  # the second is the first with the optimizer's state
VOCABULARY = 32000
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: Settings of the adapters, and of the model.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "local": ({}, {}),
    "recompute_inputs": ({"recompute_inputs": True}, {}),
    "full recompute": ({}, FULL),
}


class Model(pl.LightningModule):
    """A GPT model."""

    def __init__(self, config: Any, sequence: int) -> None:
        super().__init__()
        self.config, self.sequence = config, sequence
        self.model: Any = None
        self.observed: Observed | None = None

    def on_fit_start(self) -> None:
        """Begin to take note of what runs."""
        strategy: Any = self.trainer.strategy
        self.observed = Observed(self, strategy.parallel.sizes, str(self.trainer.precision), self.device.type)

    def configure_model(self) -> None:
        """Build it."""
        if self.model is None:
            strategy: Any = self.trainer.strategy
            self.model = build_gpt_model(
                self.config, strategy.parallel, vocab_size=VOCABULARY, max_sequence_length=self.sequence
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One microbatch."""
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1], device=inputs.device)[None].expand_as(inputs)
        return self.model(inputs, positions, None, labels=labels).mean()

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def worker(rank: int, folder: str, case: str, layers: int, hidden: int, sequence: int, batch: int) -> None:
    """Train in one mode, measure, and estimate."""
    from megatron.core.transformer import TransformerConfig

    warnings.simplefilter("ignore")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    on_cuda = torch.cuda.is_available()
    backend = "nccl" if on_cuda else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    lora, overrides = CASES[case]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=hidden // 64,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **overrides,
    )
    trainer = pl.Trainer(
        accelerator="cuda" if on_cuda else "cpu",
        devices=1,
        strategy=MCoreTP(),
        precision="bf16-true" if on_cuda else "32-true",
        callbacks=[LoRASPCallback(**lora, verbose=False)],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Model(config, sequence)
    before = psutil.Process().memory_info().rss
    trainer.fit(module, DataLoader(torch.randint(0, VOCABULARY, (STEPS * batch, sequence + 1)), batch_size=batch))  # type: ignore[arg-type]
    measured = torch.cuda.max_memory_allocated() if on_cuda else peak_rss() - before
    assert module.observed is not None
    estimated = module.observed.estimate().total
    result = {"case": case, "measured": measured, "estimated": estimated, "ratio": estimated / measured}
    hand_over(rank, folder, result)


def main() -> None:
    """Run the benchmark and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    on_cuda = torch.cuda.is_available()
    for name, value in (("layers", 8), ("hidden", 2048 if on_cuda else 512), ("sequence", 2048 if on_cuda else 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a microbatch")
    given = parser.parse_args()
    device = "max_memory_allocated" if on_cuda else "growth of the resident set"
    shown = Table("case", f"{device}, GiB", "estimate, GiB", "estimate over it")
    results = []
    for case in CASES:
        found = on_processes(1, worker, case, given.layers, given.hidden, given.sequence, given.batch)
        results.append(found)
        shown.add_row(
            case, *(f"{found[key] / 2**30:.3f}" for key in ("measured", "estimated")), f"{found['ratio']:.3f}"
        )
    Console().print(shown)
    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    save(given.out, {"device": name, "measured": device, **vars(given), "out": str(given.out)}, results)


if __name__ == "__main__":
    main()
