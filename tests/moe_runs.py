"""What workers run: the tiny mixtures trained by the Trainer through the package; and how their parts fit together."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.moe import ALPHA, CLIP, MICROBATCHES, RANK, SAMPLES, STEPS, TARGETS, Case, token_weights, tokens, values


def whole_factors(adapter: Any) -> Iterator[Tensor]:
    """Whole values of an adapter's parameters."""
    experts = (adapter.site.experts * _expert_parallel(),)
    shapes = {
        "a": (adapter.plan.rank, adapter.site.d_in),
        "b": (adapter.site.d_out, adapter.plan.rank),
        "magnitude": (adapter.site.d_out,),
    }
    for factor, parameter in adapter.named_parameters():
        lead = experts if parameter.dim() > len(shapes[factor]) else ()
        yield values(f"{adapter.site.name}.lora.{factor}", lead + shapes[factor])


def _expert_parallel() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_world_size()


def train(
    directory: str, layout: tuple[int, int, int], case: Case, steps: int = STEPS, precision: str = "32-true"
) -> dict[str, Any]:
    """The same steps through the Trainer; returns this rank's view.

    Args:
        directory: Where the model is.
        layout: TP, EP, ETP.
        case: What is trained.
        steps: Optimizer steps.
        precision: The Trainer's.
    """
    from lightning_mcore_lora import LoRASPCallback, MCoreTP, build_gpt_model, load_hf_weights
    from lightning_mcore_lora.adapters import adapters
    from tests.runs import TinyModule, trainer, watch_input

    class Module(TinyModule):
        def configure_model(self) -> None:
            if self.model is None:
                parallel = self.trainer.strategy.parallel
                balance, z = case.aux
                aux = {"moe_aux_loss_coeff": balance, "moe_z_loss_coeff": z or None}
                self.model = build_gpt_model(directory, parallel, **(aux | case.config))
                load_hf_weights(self.model, directory, parallel)
                watch_input(self.model, self.inputs)

        def on_fit_start(self) -> None:
            for _, adapter in adapters(self.model):
                adapter.load_full(*whole_factors(adapter))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            from lightning_mcore_lora.strategy.gradients import global_grad_norm

            self.norms.append(global_grad_norm(self.parameters()).item())
            trained = self.model.named_parameters()
            self.gradients.append({name: p.grad.clone() for name, p in trained if p.requires_grad})

        def train_dataloader(self) -> Any:
            dataset = TensorDataset(tokens(case.seed), torch.arange(STEPS * SAMPLES))
            # Lightning's own sampler would shuffle.
            sampler = DistributedSampler(dataset, shuffle=False, **strategy.distributed_sampler_kwargs)
            return DataLoader(
                dataset, batch_size=SAMPLES // MICROBATCHES // strategy.parallel.sizes.data, sampler=sampler
            )

    tp, ep, etp = layout
    strategy = MCoreTP(tensor_parallel_size=tp, expert_parallel_size=ep, expert_tensor_parallel_size=etp)
    lora = LoRASPCallback(rank=RANK, alpha=ALPHA, verbose=False, **({"target_modules": TARGETS} | case.lora))
    module = Module(directory, token_weights() if case.weighted else None)
    trainer(strategy, None, callbacks=(lora,), max_steps=steps, gradient_clip_val=CLIP, precision=precision).fit(module)
    trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    return {
        **places(trained, strategy.parallel),
        "weighted": case.weighted,
        "norms": module.norms,
        "losses": module.losses,
        "input_gradient": module.inputs[0].grad,
        "gradients": module.gradients,
        "weights": {name: p.detach().clone() for name, p in trained.items()},
    }


def resume(
    directory: str, layout: tuple[int, int, int], lora: dict[str, Any], out: str | None, ckpt: str | None
) -> Any:
    """Four steps, saved after two if ``out`` says where; every trained value, and what the monitor logged last."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_mcore_lora import LoRASPCallback, MCoreTP, RouterMonitor
    from tests.runs import FullModule, trainer

    tp, ep, etp = layout
    strategy = MCoreTP(tensor_parallel_size=tp, expert_parallel_size=ep, expert_tensor_parallel_size=etp)
    callbacks: list[Any] = [LoRASPCallback(rank=RANK, verbose=False, **lora), RouterMonitor()]
    if out is not None:
        callbacks.append(ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, save_top_k=-1))
    module = FullModule(directory)
    options = {"max_steps": 4, "enable_checkpointing": out is not None, "log_every_n_steps": 1}
    runner = trainer(strategy, None, callbacks=tuple(callbacks), **options)
    runner.fit(module, ckpt_path=ckpt)
    saved = strategy.engine.tensors(module.model).trained
    logged = {name: value.item() for name, value in runner.callback_metrics.items() if name.startswith("router/")}
    return {name: p.detach().clone() for name, p in saved.items()}, logged


def places(trained: dict[str, Any], parallel: Any) -> dict[str, Any]:
    """This rank, and where its part of each parameter lies in the whole."""
    marks = {}
    for name, p in trained.items():
        held = getattr(p, "experts", None)
        sharded = getattr(p, "tensor_model_parallel", False)
        where = (sharded, p.partition_dim, p.partition_stride) if sharded else (False, -1, 1)
        marks[name] = (*where, held and held.name)
    ranks = {"tp": parallel.tp_rank, "etp": parallel.etp_rank, "ep": parallel.ep_rank, "dp": parallel.dp_rank}
    return {"marks": marks, "ranks": ranks}


def whole(ranks: list[dict[str, Any]], parts: list[Tensor], name: str, strict: bool = True) -> Tensor:
    """Put the parts of a parameter together; with ``strict`` copies must be equal to the bit."""
    sharded, dim, stride, held = ranks[0]["marks"][name]
    by_place: dict[tuple[int, int], Tensor] = {}
    for rank, part in zip(ranks, parts, strict=True):
        at = rank["ranks"]
        place = (at["ep"] if held == "EACH" else 0, at["etp" if held else "tp"] if sharded else 0)
        assert torch.equal(by_place.setdefault(place, part), part) or not strict, f"copies of {name} differ"
    experts = []
    for ep in sorted({place[0] for place in by_place}):
        shards = [by_place[place] for place in sorted(by_place) if place[0] == ep]
        blocks = [shard.chunk(stride, dim) if sharded else (shard,) for shard in shards]
        experts.append(torch.cat([block[i] for i in range(len(blocks[0])) for block in blocks], dim if sharded else 0))
    return torch.cat(experts) if held == "EACH" else experts[0]


def losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Loss of each step over all replicas: means, or sums over the tokens that count."""
    weights = token_weights().split(SAMPLES)
    replicas = {rank["ranks"]["dp"]: rank["losses"] for rank in ranks}
    steps = len(ranks[0]["losses"]) // MICROBATCHES
    totals = [sum(sum(values[MICROBATCHES * i :][:MICROBATCHES]) for values in replicas.values()) for i in range(steps)]
    if ranks[0]["weighted"]:
        return [total / weight.sum().item() for total, weight in zip(totals, weights, strict=False)]
    return [total / MICROBATCHES / len(replicas) for total in totals]


def input_gradient(ranks: list[dict[str, Any]], case: Case) -> Tensor:
    """The gradient of the first microbatch's embeddings, ``[samples, sequence, hidden]``, in the oracle's order."""
    tp = len({rank["ranks"]["tp"] for rank in ranks})
    by_replica: dict[int, dict[int, Tensor]] = {}
    for rank in ranks:
        by_replica.setdefault(rank["ranks"]["dp"], {})[rank["ranks"]["tp"]] = rank["input_gradient"]
    whole_ones = [torch.cat([shards[i] for i in range(tp)]).transpose(0, 1) for _, shards in sorted(by_replica.items())]
    # Sample i of the microbatch is replica i % replicas' next; each divided what it saw by its own number.
    scale = 1.0 / (token_weights()[:SAMPLES].sum() if case.weighted else len(whole_ones))
    return torch.stack(whole_ones, 1).flatten(0, 1) * scale
