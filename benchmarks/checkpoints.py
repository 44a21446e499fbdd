"""Checkpoints beside ``torch.save`` of the same bytes: ``python -m benchmarks.checkpoints --out FILE``.

Adapters of a GPT model and the moments of their optimizer, tensor-parallel over two processes (gloo): saved, loaded at
the same layout, and loaded at tensor-parallel size 1. Beside it each process writes its tensors with ``torch.save``,
and has the disk hold them, and reads them again. Runs alternate; times are compared as ratios.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.launch import hand_over, on_processes, save

TP = 2


@dataclass(frozen=True)
class Case:
    """What is saved.

    Args:
        layers: Layers of the model.
        hidden: Its hidden size.
        ffn: Hidden size of its MLP.
        rank: Rank of the adapters.
        base: Whether the frozen base is saved too.
    """

    layers: int = 16
    hidden: int = 1024
    ffn: int = 2816
    rank: int = 32
    base: bool = False


CASES = (Case(), Case(layers=4, base=True))


class Holder:
    """An engine with a model, its adapters and their optimizer at one layout."""

    def __init__(self, case: Case, tensor_parallel_size: int, in_background: bool = False) -> None:
        from megatron.core.transformer import TransformerConfig

        from lightning_mcore_lora import LoRAConfig, apply_lora, build_gpt_model
        from lightning_mcore_lora.strategy.engine import Engine

        minute = timedelta(minutes=1)
        sizes = (tensor_parallel_size, None, 1, None)
        self.engine = Engine(*sizes, minute, minute, save_base_weights=case.base, async_save=in_background)
        self.engine.start(TP)
        assert self.engine.parallel is not None
        config = TransformerConfig(
            num_layers=case.layers,
            hidden_size=case.hidden,
            ffn_hidden_size=case.ffn,
            num_attention_heads=16,
            gated_linear_unit=True,
            add_bias_linear=False,
        )
        self.model = build_gpt_model(config, self.engine.parallel, vocab_size=1024, max_sequence_length=64)
        apply_lora(self.model, LoRAConfig(rank=case.rank))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained)
        for p in trained:
            moments = {"exp_avg": torch.rand_like(p), "exp_avg_sq": torch.rand_like(p)}
            self.optimizer.state[p] = moments | {"step": torch.tensor(1.0)}

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors, as ``torch.save`` would have them; what peers share is rank zero's."""
        assert self.engine.parallel is not None
        first = self.engine.parallel.tp_rank == 0
        saved: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            held = [("", p)] + [(key, value) for key, value in self.optimizer.state.get(p, {}).items()]
            if (first or getattr(p, "tensor_model_parallel", False)) and (
                p.requires_grad or self.engine._save_base_weights
            ):
                saved |= {f"{name}.{key}": value.detach().clone() for key, value in held}
        return saved

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        self.engine.save(path, {}, self.engine.tensors(self.model), [self.optimizer], [])

    def load(self, path: Path) -> None:
        """Read one."""
        loaded = self.engine.load(path, self.engine.tensors(self.model), [self.optimizer])
        self.engine.load_weights(self.model, loaded.weights)
        self.optimizer.load_state_dict(loaded.optimizer_states[0])


def torch_save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write this rank's tensors, and have the disk hold them."""
    with file.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


def seconds(action: Callable[[], Any]) -> float:
    """How long all ranks take together."""
    torch.distributed.barrier()
    begin = time.perf_counter()
    action()
    torch.distributed.barrier()
    return time.perf_counter() - begin


def measure(case: Case, runs: int, folder: Path) -> dict[str, Any]:
    """One case."""
    rank = torch.distributed.get_rank()
    times: dict[str, list[float]] = {}

    def take(what: str, action: Callable[[], Any]) -> None:
        times.setdefault(what, []).append(seconds(action))

    sharded = Holder(case, TP)
    tensors, file, path = sharded.tensors(), folder / f"torch-{rank}.pt", folder / "ours.ckpt"
    content = torch.tensor(sum(t.nbytes for t in tensors.values()))
    torch.distributed.all_reduce(content)
    for _ in range(runs + 1):
        take("torch.save", lambda: torch_save(tensors, file))
        take("save", lambda: sharded.save(path))
        take("torch.load", lambda: torch.load(file, weights_only=True))
        take("load", lambda: sharded.load(path))
    sharded.engine.stop()
    behind = Holder(case, TP, in_background=True)
    for _ in range(runs + 1):
        take("asynchronous save", lambda: behind.save(path))
        behind.engine.finish_saving()
    behind.engine.stop()
    whole = Holder(case, 1)
    for _ in range(runs + 1):
        take("load at TP=1", lambda: whole.load(path))
    whole.engine.stop()
    size = sum(item.stat().st_size for item in path.iterdir())
    median = {what: statistics.median(values[1:]) for what, values in times.items()}  # the first warms up
    megabytes = content.item() / 1e6
    return {
        **asdict(case),
        "megabytes": megabytes,
        "size_over_content": size / content.item(),
        **{f"{what} MB/s": megabytes / time for what, time in median.items()},
        "save_over_torch": median["save"] / median["torch.save"],
        "asynchronous_save_over_torch": median["asynchronous save"] / median["torch.save"],
        "load_over_torch": median["load"] / median["torch.load"],
        "reshard_over_torch": median["load at TP=1"] / median["torch.load"],
    }


def table(result: dict[str, Any]) -> Table:
    """One case."""
    what = "adapters, optimizer and base" if result["base"] else "adapters and optimizer"
    title = f"{what} of {{layers}} layers, hidden {{hidden}}, rank {{rank}}: {{megabytes:.1f}} MB".format(**result)
    shown = Table("", "MB/s", "time over torch", title=title, title_justify="left")
    rows = {
        "save": "save_over_torch",
        "asynchronous save": "asynchronous_save_over_torch",
        "load": "load_over_torch",
        "load at TP=1": "reshard_over_torch",
    }
    for name, ratio in rows.items():
        shown.add_row(name, f"{result[f'{name} MB/s']:.0f}", f"{result[ratio]:.2f}")
    shown.add_row("size over content", "", f"{result['size_over_content']:.3f}")
    return shown


def worker(rank: int, folder: str, cases: list[Case], runs: int) -> None:
    """Measure every case, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    results = []
    for i, case in enumerate(cases):
        place = Path(folder, str(i))
        place.mkdir(exist_ok=True)
        results.append(measure(case, runs, place))
        if rank == 0:
            Console(width=140).print(table(results[-1]))
    hand_over(rank, folder, results)


def main() -> None:
    """Run the benchmark and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=9, help="alternating runs")
    for name in ("layers", "hidden", "ffn", "rank"):
        parser.add_argument(f"--{name}", type=int, help="of every case, in place of its own")
    arguments = parser.parse_args()
    given = {f.name: value for f in fields(Case) if (value := getattr(arguments, f.name, None)) is not None}
    cases = [Case(**(asdict(case) | given)) for case in CASES]
    results = on_processes(TP, worker, cases, arguments.runs)
    save(arguments.out, {"tensor_parallel_size": TP, "runs": arguments.runs}, results)


if __name__ == "__main__":
    main()
