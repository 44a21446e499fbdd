"""Adapters on a dense model, mode beside mode: ``python -m benchmarks.dense --out FILE``.

Every mode, the frozen base alone among them, computes the gradient of the model's input. Steps alternate over the modes
within one run; times are compared as ratios. Two processes, TP 2 with sequence parallelism, gloo.
"""

import argparse
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.launch import hand_over, on_processes, save

TP = 2
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
#: Name of a row to what ``LoRAConfig`` gets; floor and published are no mode of ours.
MODES: dict[str, dict[str, Any] | None] = {
    "floor": None,
    "gather": {"sequence_mode": "gather"},
    "regather": {"sequence_mode": "regather"},
    "local": {"sequence_mode": "local"},
    "local_recompute_inputs": {"sequence_mode": "local", "recompute_inputs": True},
    "published": None,
}


@dataclass(frozen=True)
class Size:
    """The model and its batch of one sequence."""

    layers: int = 4
    hidden: int = 1024
    ffn: int = 2048
    sequence: int = 1024
    heads: int = 16
    vocabulary: int = 1024


@dataclass
class Counts:
    """What one mode costs on rank zero.

    Args:
        kept_bytes: Distinct storages that forward leaves alive for backward, parameters left out.
        sent_bytes: Bytes that the rank sends in a step, the sums of weights' gradients among them.
        wide_collectives: Collectives over at least ``sequence * hidden`` elements.
        collectives: All collectives of a step over more than one process.
        seconds: Duration of each step.
    """

    kept_bytes: int
    sent_bytes: int
    wide_collectives: int
    collectives: int
    seconds: list[float]


class Step:
    """One mode's model, and its step: forward, backward, reduction of the adapters' gradients.

    Args:
        model: A frozen model, which the step keeps.
        size: Its size.
        mode: Name of the row.
        rank: Rank of the adapters.
        dropout: Their dropout.
        parallel: The layout.
    """

    def __init__(self, model: Any, size: Size, mode: str, rank: int, dropout: float, parallel: Any) -> None:
        from benchmarks.published import apply_published
        from lightning_mcore_lora import LoRAConfig, apply_lora
        from lightning_mcore_lora.adapters import adapters
        from lightning_mcore_lora.strategy.gradients import GradientReducer
        from lightning_mcore_lora.strategy.precision import Masters

        self.model, self.size = model, size
        settings = MODES[mode]
        if settings is not None:
            apply_lora(model, LoRAConfig(rank=rank, alpha=rank, dropout=dropout, **settings))
            for _, adapter in adapters(model):
                generator = torch.Generator().manual_seed(1)
                nn.init.normal_(adapter.b, std=rank**-0.5, generator=generator)
        elif mode == "published":
            apply_published(model, TARGETS, rank, 1.0, dropout)
        self.reducer = None if mode == "floor" else GradientReducer(model, parallel, Masters())
        self._hook = model.decoder.register_forward_pre_hook(self._keep_input, with_kwargs=True)
        self.ids = torch.arange(size.sequence)[None] % size.vocabulary

    def _keep_input(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._input = kwargs["hidden_states"].requires_grad_()
        self._input.retain_grad()

    def forward(self) -> Tensor:
        """The loss."""
        positions = torch.arange(self.size.sequence)[None]
        return self.model(self.ids, positions, None, labels=self.ids.roll(-1, 1)).mean()

    def __call__(self) -> None:
        """One optimizer step without the optimizer."""
        self.backward(self.forward())

    def backward(self, loss: Tensor) -> None:
        """Backward and reduction."""
        if self.reducer is not None:
            loss = self.reducer.before_backward(loss, None)
        loss.backward()
        if self.reducer is not None:
            self.reducer.after_backward()
            self.reducer.finalize()
            self.reducer.clear()
        assert self._input.grad is not None

    def close(self) -> None:
        """Leave the model as it was."""
        from benchmarks.published import remove_published
        from lightning_mcore_lora import remove_lora

        if self.reducer is not None:
            self.reducer.close()
        self._hook.remove()
        remove_lora(self.model)
        remove_published(self.model)


def measure(size: Size, rank: int, dropout: float, steps: int, models: dict[str, nn.Module], parallel: Any) -> dict:
    """Counts of every mode; steps alternate over the modes."""
    from benchmarks.counting import Collectives, kept_for_backward

    runs = {mode: Step(model, size, mode, rank, dropout, parallel) for mode, model in models.items()}
    found: dict[str, Counts] = {}
    for mode, run in runs.items():
        run()  # caches are filled
        tensors = [*run.model.parameters(), *run.model.buffers()]
        own = {t.untyped_storage().data_ptr() for t in tensors}
        with Collectives() as collectives, kept_for_backward(own) as kept:
            loss = run.forward()
            kept_bytes = kept()
            run.backward(loss)
        counted = (collectives.sent(), collectives.wide(size.sequence * size.hidden), len(collectives.seen))
        found[mode] = Counts(kept_bytes, *counted, [])
        del loss, kept
    gc.collect()
    gc.disable()
    for _ in range(steps):
        for mode, run in runs.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            run()
            torch.distributed.barrier()
            found[mode].seconds.append(time.perf_counter() - start)
        gc.collect()
    gc.enable()
    for run in runs.values():
        run.close()
    return {mode: summary(counts, found) for mode, counts in found.items()}


def summary(counts: Counts, found: dict[str, Counts]) -> dict[str, Any]:
    """Counts with times as ratios of medians and of minima."""
    result = asdict(counts)
    seconds = result.pop("seconds")
    for other in ("gather", "floor"):
        reference = found[other].seconds
        result[f"step_over_{other}"] = statistics.median(seconds) / statistics.median(reference)
        result[f"step_over_{other}_minimum"] = min(seconds) / min(reference)
    return result


def worker(rank: int, folder: str, size: Size, cases: list[tuple[int, float]], steps: int) -> None:
    """Measure every case, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    from megatron.core.transformer import TransformerConfig

    from lightning_mcore_lora import build_gpt_model, cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(TP, TP, True))
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_attention_heads=size.heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    build: Callable[[], nn.Module] = functools.partial(
        build_gpt_model, config, parallel, vocab_size=size.vocabulary, max_sequence_length=size.sequence
    )
    models = {}
    for mode in MODES:
        seeding.seed_for_init()
        models[mode] = build().requires_grad_(False)
    results = []
    for width, dropout in cases:
        seeding.seed_for_training(parallel)
        modes = measure(size, width, dropout, steps, models, parallel)
        results.append({"rank": width, "dropout": dropout, "modes": modes})
        if rank == 0:
            Console(width=140).print(table(results[-1]))
    hand_over(rank, folder, results)


def table(result: dict[str, Any]) -> Table:
    """One case."""
    shown = Table(title=f"rank {result['rank']}, dropout {result['dropout']}", title_justify="left")
    columns = ("kept_bytes", "sent_bytes", "wide_collectives", "collectives", "step_over_gather", "step_over_floor")
    for column in ("mode", *columns):
        shown.add_column(column, justify="left" if column == "mode" else "right")
    for mode, row in result["modes"].items():
        cells = []
        for column in columns:
            value = row[column]
            if column.endswith("bytes"):
                cells.append(f"{value / 2**20:.2f} MiB")
            elif isinstance(value, float):
                cells.append(f"{value:.3f} (min {row[column + '_minimum']:.3f})")
            else:
                cells.append(str(value))
        shown.add_row(mode, *cells)
    return shown


def main() -> None:
    """Run the benchmark and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=15, help="alternating steps of each mode")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], help="ranks of the adapters")
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.1], help="dropouts of the adapters")
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of the model")
    arguments = parser.parse_args()
    size = Size(**{name: getattr(arguments, name) for name in asdict(Size())})
    cases = [(rank, dropout) for rank in arguments.ranks for dropout in arguments.dropouts]
    results = on_processes(TP, worker, size, cases, arguments.steps)
    save(arguments.out, {"size": asdict(size), "tensor_parallel_size": TP, "steps": arguments.steps}, results)


if __name__ == "__main__":
    main()
