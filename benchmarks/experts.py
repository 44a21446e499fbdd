"""Adapters of experts beside the published scheme: ``python -m benchmarks.experts --out FILE``.

The experts of one layer, expert-tensor-parallel over two processes (gloo), forward and backward with the gradient of
the inputs: the adapters of fc1 and fc2 alone, their base linears left out, and the whole layer with its frozen base.
Microbatches alternate over the schemes within one run; times are compared as ratios.
"""

import argparse
import functools
import gc
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.launch import hand_over, on_processes, save

TP = ETP = 2
MICROBATCHES = 8
SCHEMES = ("ours", "published")


@dataclass(frozen=True)
class Case:
    """One layer of experts.

    Args:
        experts: Experts, all on each rank.
        ffn: Their hidden size, over both ranks.
        rank: Rank of the adapters.
        hidden: The model's hidden size.
        tokens: Tokens of all experts together, unevenly spread.
    """

    experts: int
    ffn: int
    rank: int
    hidden: int = 2048
    tokens: int = 4096

    def sizes(self) -> Tensor:
        """Tokens of each expert, always the same."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(self.experts, (self.tokens,), generator=generator)
        return torch.bincount(drawn, minlength=self.experts)


CASES = (Case(4, 2688, 32), Case(16, 768, 32), Case(4, 2688, 8))


def build(case: Case, parallel: Any) -> Any:
    """Frozen experts (``SequentialMLP``)."""
    from megatron.core.transformer import TransformerConfig

    from lightning_mcore_lora import build_gpt_model

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.experts,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_token_dispatcher_type="alltoall",
        num_attention_heads=2,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    model: Any = build_gpt_model(config, parallel, vocab_size=2, max_sequence_length=2)
    return model.decoder.layers[0].mlp.experts.requires_grad_(False)


class Run:
    """One scheme beside experts of its own.

    Args:
        scheme: ``ours`` or ``published``.
        case: The experts.
        parallel: The layout.
    """

    def __init__(self, scheme: str, case: Case, parallel: Any) -> None:
        from benchmarks.published import apply_published_experts
        from lightning_mcore_lora import LoRAConfig, apply_lora
        from lightning_mcore_lora.adapters import adapters
        from lightning_mcore_lora.strategy import seeding
        from lightning_mcore_lora.strategy.gradients import GradientReducer
        from lightning_mcore_lora.strategy.precision import Masters

        seeding.seed_for_init()
        self.experts, self.sizes, self.alone = build(case, parallel), case.sizes(), False
        self._outputs: list[Tensor] = []
        generator = torch.Generator().manual_seed(2)
        self._let_base_be_left_out(case, generator)
        if scheme == "ours":
            apply_lora(self.experts, LoRAConfig(rank=case.rank, alpha=case.rank, target_modules=("*",)))
            for _, adapter in adapters(self.experts):
                nn.init.normal_(adapter.b, std=case.rank**-0.5, generator=torch.Generator().manual_seed(1))
        else:
            apply_published_experts(self.experts, case.rank, 1.0)
        self.reducer = GradientReducer(self.experts, parallel, Masters())
        self.x = torch.randn(case.tokens, case.hidden, generator=generator).requires_grad_()
        self.probs = torch.rand(case.tokens, generator=generator)
        self.grad = torch.randn(case.tokens, case.hidden, generator=generator)

    def _let_base_be_left_out(self, case: Case, generator: torch.Generator) -> None:
        """Have :attr:`alone` run fc1 and fc2 on inputs of their own, beside outputs of zeros."""
        self.inner = torch.randn(case.tokens, case.ffn // ETP, generator=generator).requires_grad_()
        self.inner_grad = torch.randn(case.tokens, 2 * case.ffn // ETP, generator=generator)
        parts = self.inner.split(self.sizes.tolist())
        for expert, inner in zip(self.experts.local_experts, parts, strict=True):
            expert.forward = functools.partial(self._expert, expert, expert.forward, inner)
            for linear in (expert.linear_fc1, expert.linear_fc2):
                linear.forward = functools.partial(self._linear, linear.weight.shape[0], linear.forward)

    def _expert(self, expert: Any, forward: Any, inner: Tensor, x: Tensor, probs: Tensor) -> Any:
        if not self.alone:
            return forward(x, probs)
        self._outputs.append(expert.linear_fc1(x)[0])
        return expert.linear_fc2(inner)[0], None

    def _linear(self, width: int, forward: Any, x: Tensor, **options: Any) -> Any:
        return (x.new_zeros(len(x), width), None) if self.alone else forward(x, **options)

    def microbatch(self) -> None:
        """Forward and backward."""
        self.x.grad = self.inner.grad = None
        output, _ = self.experts(self.x, self.sizes, self.probs)
        if self.alone:
            inner_grads = self.inner_grad.split(self.sizes.tolist())
            torch.autograd.backward([output, *self._outputs], [self.grad, *inner_grads])
            self._outputs.clear()
        else:
            output.backward(self.grad)

    def step(self) -> None:
        """Eight microbatches, and the gradients' reduction."""
        for _ in range(MICROBATCHES):
            self.microbatch()
        self.reducer.finalize()
        self.reducer.clear()


def measure(case: Case, runs: int, parallel: Any) -> dict[str, Any]:
    """What one case costs, on rank zero."""
    from benchmarks.counting import Collectives

    built = {scheme: Run(scheme, case, parallel) for scheme in SCHEMES}
    blocking, sent = {}, {}
    places = [(alone, scheme) for alone in (True, False) for scheme in SCHEMES]
    seconds: dict[tuple[bool, str], list[float]] = {place: [] for place in places}
    for scheme, run in built.items():
        run.microbatch()  # caches are filled
        run.reducer.clear()
        with Collectives() as collectives:
            run.microbatch()
        blocking[scheme] = len(collectives.seen)
        run.reducer.clear()
        with Collectives() as collectives:
            run.step()
        sent[scheme] = collectives.sent()
    gc.collect()
    gc.disable()
    for _ in range(runs):
        for alone, scheme in places:
            built[scheme].alone = alone
            torch.distributed.barrier()
            start = time.perf_counter()
            built[scheme].microbatch()
            torch.distributed.barrier()
            seconds[alone, scheme].append(time.perf_counter() - start)
        gc.collect()
    gc.enable()
    for run in built.values():
        run.reducer.close()
    return {
        **asdict(case),
        **{
            f"{prefix}time_over_published{suffix}": of(seconds[alone, "ours"]) / of(seconds[alone, "published"])
            for prefix, alone in (("", True), ("layer_", False))
            for suffix, of in (("", statistics.median), ("_minimum", min))
        },
        "blocking_collectives": blocking["ours"],
        "published_blocking_collectives": blocking["published"],
        "bytes_per_step_8_microbatches": sent["ours"],
        "published_bytes_per_step_8_microbatches": sent["published"],
    }


def worker(rank: int, folder: str, cases: list[Case], runs: int) -> None:
    """Measure every case, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TP)
    from lightning_mcore_lora import cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(TP, TP, True, 1, ETP))
    results = []
    for case in cases:
        results.append(measure(case, runs, parallel))
        if rank == 0:
            Console(width=140).print(table(results[-1]))
    hand_over(rank, folder, results)


def table(result: dict[str, Any]) -> Table:
    """One case."""
    title = "{experts} experts, ffn {ffn}, rank {rank}".format(**result)
    shown = Table("", "ours", "published", title=title, title_justify="left")
    for what, prefix in (("time of the adapters", ""), ("time of the layer", "layer_")):
        ratio, least = (result[f"{prefix}time_over_published{suffix}"] for suffix in ("", "_minimum"))
        shown.add_row(what, f"{ratio:.3f} (min {least:.3f})", "1")
    shown.add_row(
        "blocking collectives", str(result["blocking_collectives"]), str(result["published_blocking_collectives"])
    )
    sent = (result[f"{scheme}bytes_per_step_8_microbatches"] / 2**20 for scheme in ("", "published_"))
    shown.add_row("sent in a step of 8 microbatches", *(f"{mib:.2f} MiB" for mib in sent))
    return shown


def main() -> None:
    """Run the benchmark and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=15, help="alternating runs of each scheme")
    for name in (field.name for field in fields(Case)):
        parser.add_argument(f"--{name}", type=int, help="of every case, in place of its own")
    arguments = parser.parse_args()
    given = {f.name: value for f in fields(Case) if (value := getattr(arguments, f.name)) is not None}
    cases = list(dict.fromkeys(Case(**(asdict(case) | given)) for case in CASES))
    results = on_processes(TP, worker, cases, arguments.runs)
    layout = {"tensor_parallel_size": TP, "expert_tensor_parallel_size": ETP}
    save(arguments.out, {**layout, "runs": arguments.runs}, results)


if __name__ == "__main__":
    main()
