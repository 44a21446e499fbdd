"""What workers run: a fit that is saved at one layout and goes on at another; and how its parts fit together.

Whole tensors are put together here by the parameters' marks and this rank's coordinates, without the package's code.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests import tiny

SAMPLES, GLOBAL_BATCH, STOP, STEPS, SEQUENCE = 20, 4, 3, 7, 12
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Layout:
    """TP, EP, ETP on a number of processes."""

    tp: int = 1
    world: int = 1
    ep: int = 1
    etp: int | None = None

    def __str__(self) -> str:
        return f"tp{self.tp}ep{self.ep}etp{self.etp or self.tp}on{self.world}"


@dataclass(frozen=True)
class Job:
    """What is trained.

    Args:
        lora: Fields of ``LoRAConfig``; ``None`` trains every weight.
        config: Fields of ``TransformerConfig``.
        strategy: Fields of ``MCoreTP``.
        accumulate: Microbatches of a step.
        precision: The Trainer's.
        bound: By how much weights may differ between layouts; ``None`` where each forward rounds them to bfloat16.
    """

    lora: dict[str, Any] | None = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    precision: str = "32-true"
    bound: float | None = 1e-5


class Module(pl.LightningModule):
    """Trains a tiny model, and looks at what it has before the first step and after the last."""

    def __init__(self, directory: str, job: Job, load_base: bool = True) -> None:
        super().__init__()
        self.directory, self.job, self.load_base = directory, job, load_base
        self.model: Any = None
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))
        self.began: dict[str, Any] = {}
        self.losses: list[float] = []
        self.seen: list[list[int]] = []

    def configure_model(self) -> None:
        from lightning_mcore_lora import build_gpt_model, load_hf_weights

        if self.model is None:
            parallel = self.trainer.strategy.parallel
            self.model = build_gpt_model(self.directory, parallel, **self.job.config)
            if self.load_base:
                load_hf_weights(self.model, self.directory, parallel)

    def on_fit_start(self) -> None:
        from lightning_mcore_lora.adapters import adapters

        if self.trainer.global_step == 0:
            for _, adapter in adapters(self.model):
                full = torch.Generator().manual_seed(len(adapter.site.name))
                shape = (adapter.site.d_out, adapter.plan.rank)
                if "b" in adapter.plan.each:
                    from megatron.core import parallel_state

                    shape = (adapter.site.experts * parallel_state.get_expert_model_parallel_world_size(), *shape)
                b = torch.randn(shape, generator=full) * 0.1
                with torch.no_grad():
                    adapter.b.copy_(adapter._shard(adapter._local(b, "b"), "b"))

    def on_train_start(self) -> None:
        self.began = snapshot(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from tests.runs import token_losses

        samples, index = batch
        self.seen.append(index.tolist())
        self.steps_seen += 1
        loss = token_losses(self.model, samples).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=tiny.ADAM_EPS)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, tiny.VOCAB, (SAMPLES, SEQUENCE + 1), generator=generator)
        replicas = self.trainer.strategy.parallel.sizes.data
        # Lightning's own sampler divides and shuffles.
        size = GLOBAL_BATCH // replicas // self.job.accumulate
        return DataLoader(TensorDataset(tokens, torch.arange(SAMPLES)), batch_size=size, shuffle=True)


def snapshot(module: Module) -> dict[str, Any]:
    """This rank's part of everything that a checkpoint holds."""
    strategy = module.trainer.strategy
    parallel = strategy.parallel
    trained = strategy.engine.tensors(module).trained
    optimizer = module.trainer.optimizers[0]
    marks = {}
    for name, p in trained.items():
        held, sharded = getattr(p, "experts", None), getattr(p, "tensor_model_parallel", False)
        where = (p.partition_dim, p.partition_stride) if sharded else None
        marks[name] = (where, held.name if held else None)
    states = {id(p): state for p, state in optimizer.state.items()}
    moments = {
        f"{key}:{name}": value.clone()
        for name, p in trained.items()
        for key, value in states.get(id(p), {}).items()
        if value.dim()
    }
    return {
        "ranks": {"tp": parallel.tp_rank, "etp": parallel.etp_rank, "ep": parallel.ep_rank, "dp": parallel.dp_rank},
        "marks": marks,
        "tensors": {name: p.detach().clone() for name, p in trained.items()} | moments,
        "numbers": {
            "rate": optimizer.param_groups[0]["lr"],
            "steps": {float(state["step"]) for state in states.values()},
            "global_step": module.trainer.global_step,
            "buffer": module.steps_seen.item(),
        },
    }


def fit(
    directory: str,
    layout: Layout,
    job: Job,
    stop: int,
    out: str | None = None,
    ckpt: str | None = None,
    load_base: bool = True,
) -> dict[str, Any]:
    """Train to step ``stop``; save at the end if ``out`` says where; go on from ``ckpt``."""
    from lightning_mcore_lora import LoRASPCallback, MCoreTP
    from tests.runs import trainer

    pl.seed_everything(7, verbose=False)
    strategy = MCoreTP(
        tensor_parallel_size=layout.tp,
        expert_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        **job.strategy,
    )
    lora = () if job.lora is None else (LoRASPCallback(verbose=False, **({"rank": 4} | job.lora)),)
    module = Module(directory, job, load_base)
    saver = _SaveAtEnd(out)
    options = {"max_steps": stop, "accumulate_grad_batches": job.accumulate, "precision": job.precision}
    trainer(strategy, None, callbacks=(*lora, saver), **options).fit(module, ckpt_path=ckpt)
    return {"began": module.began, "ended": saver.ended, "losses": module.losses, "seen": module.seen}


class _SaveAtEnd(pl.Callback):
    def __init__(self, out: str | None) -> None:
        self.out = out
        self.ended: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.ended = snapshot(pl_module)
        if self.out is not None:
            trainer.save_checkpoint(self.out)


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors from every rank's parts; copies must be equal to the bit."""
    places: dict[str, dict[tuple[int, int], Tensor]] = {}
    layouts: dict[str, tuple[Any, str | None]] = {}
    for rank in ranks:
        at = rank["ranks"]
        local = [int(match[1]) for match in map(_EXPERT.search, rank["marks"]) if match]
        first = (max(local) + 1) * at["ep"] if local else 0
        for key, value in rank["tensors"].items():
            where, held = rank["marks"][key.split(":")[-1]]
            numbered = _EXPERT.search(key)
            name = _EXPERT.sub(lambda match, first=first: f".experts.{int(match[1]) + first}.", key)
            shard = at["etp" if held or numbered else "tp"] if where else 0
            place = (at["ep"] if held == "EACH" else 0, shard)
            layouts[name] = (where, held)
            known = places.setdefault(name, {}).setdefault(place, value)
            assert torch.equal(known, value), f"copies of {name} differ"
    return {name: _join(parts, *layouts[name]) for name, parts in places.items()}


def _join(parts: dict[tuple[int, int], Tensor], where: tuple[int, int] | None, held: str | None) -> Tensor:
    experts = []
    for ep in sorted({place[0] for place in parts}):
        shards = [parts[place] for place in sorted(parts) if place[0] == ep]
        if where is None:
            experts.append(shards[0])
            continue
        dim, stride = where
        blocks = [shard.chunk(stride, dim) for shard in shards]
        experts.append(torch.cat([block[i] for i in range(stride) for block in blocks], dim))
    return torch.cat(experts) if held == "EACH" else experts[0]


def seen(ranks: list[dict[str, Any]], accumulate: int) -> list[list[int]]:
    """Which samples all replicas together saw in each optimizer step."""
    replicas = {rank["ended"]["ranks"]["dp"]: rank["seen"] for rank in ranks}
    steps = len(ranks[0]["seen"]) // accumulate
    return [
        sorted(
            index
            for batches in replicas.values()
            for batch in batches[accumulate * i : accumulate * (i + 1)]
            for index in batch
        )
        for i in range(steps)
    ]
