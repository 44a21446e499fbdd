"""What workers do with adapters of the tiny families."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests import families

Layout = tuple[int, int, int]


def build(directory: str, layout: Layout, **overrides: Any) -> Any:
    """The model with its weights at (TP, EP, ETP)."""
    from lightning_mcore_lora import build_gpt_model, cpu_backend, load_hf_weights
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    tp, ep, etp = layout
    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, tp > 1, ep, etp))
    seeding.seed_for_init()
    model = build_gpt_model(directory, parallel, **overrides)
    load_hf_weights(model, directory, parallel)
    return model


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    return model(inputs, _positions(inputs), None, labels=labels).mean()


def whole_gradients(loss: Any) -> Any:
    """A loss after whose backward gradients of norms, of which each rank saw a part of the sequence, are summed."""
    hooked: list[Any] = []

    def summed(model: Any, batch: Tensor) -> Tensor:
        partial = [p for p in model.parameters() if p.requires_grad and getattr(p, "sequence_parallel", False)]
        hooked.extend([] if hooked else [p.register_hook(_sum) for p in partial])
        return loss(model, batch)

    return summed


def _sum(grad: Tensor) -> Tensor:
    from megatron.core import parallel_state

    grad = grad.clone()
    torch.distributed.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
    return grad


def _positions(inputs: Tensor) -> Tensor:
    return torch.arange(inputs.shape[1])[None].expand_as(inputs)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Logits of the first batch without padding, on every rank."""
    from megatron.core import parallel_state

    inputs = families.tokens()[:, :-1].contiguous()
    mine = model(inputs, _positions(inputs), None)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts, -1)[..., : families.VOCAB]


def base_logits(directory: str, layout: Layout) -> Tensor:
    """Logits of the base model."""
    return logits_of(build(directory, layout))


def train_and_save(directory: str, layout: Layout, out: str, lora: dict[str, Any], **save: Any) -> Tensor:
    """Five steps with adapters, whose B begins random; saved; the logits."""
    from lightning_mcore_lora import LoRAConfig, apply_lora, save_peft_adapter
    from lightning_mcore_lora.adapters import adapters

    model = build(directory, layout)
    apply_lora(model, LoRAConfig(**lora))
    shake(model)
    families.train(model, whole_gradients(loss_of), families.STEPS)
    assert all(adapter.b.grad is not None for _, adapter in adapters(model))
    save_peft_adapter(model, out, **save)
    return logits_of(model.eval())


@torch.no_grad()
def shake(model: Any) -> None:
    """Give every adapter the same random B, and magnitudes, at every layout."""
    from lightning_mcore_lora.adapters import adapters
    from lightning_mcore_lora.adapters.whole import whole_factors

    for i, (_, adapter) in enumerate(adapters(model)):
        a, b, magnitude = whole_factors(adapter)
        generator = torch.Generator().manual_seed(i)
        b = torch.randn(b.shape, generator=generator) * 0.05
        values = {"a": a, "b": b}
        adapter.load_full(
            *(v if n in adapter.plan.each or not adapter.site.experts else v[0] for n, v in values.items())
        )
        if magnitude is not None and adapter.magnitude is not None:
            adapter.magnitude.mul_(1.1)


def load(directory: str, layout: Layout, adapter: str, out: str | None, lora: dict[str, Any] | None = None) -> Tensor:
    """Load an adapter, save it again, and save the gradients of the next step in the same form; the logits."""
    from megatron.core import parallel_state

    from lightning_mcore_lora import LoRAConfig, apply_lora, load_peft_adapter, save_peft_adapter
    from lightning_mcore_lora.adapters import adapters

    model = build(directory, layout)
    if lora is not None:
        apply_lora(model, LoRAConfig(**lora))
    load_peft_adapter(model, adapter)
    logits = logits_of(model.eval())
    assert out is not None
    save_peft_adapter(model, Path(out) / "again")
    model.train()
    loss_of(model, families.tokens(families.STEPS)).backward()
    with torch.no_grad():
        for _, held in adapters(model):
            # In this loop without data-parallel sums, experts saw the same tokens of each replica.
            replicas = parallel_state.get_data_parallel_world_size() if held.site.experts else 1
            for parameter in held.parameters():
                parameter.copy_(parameter.grad / replicas)
    save_peft_adapter(model, Path(out) / "gradients")
    return logits


def merged(directory: str, layout: Layout, adapter: str, **overrides: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits before and after merging, and this rank's merged weights."""
    from lightning_mcore_lora import load_peft_adapter, merge_lora, unmerge_lora

    model = build(directory, layout, **overrides).eval()
    load_peft_adapter(model, adapter)
    before = logits_of(model)
    merge_lora(model)
    after = logits_of(model)
    weights = {name: p.clone() for name, p in model.named_parameters() if ".lora." not in name}
    unmerge_lora(model)
    assert torch.equal(logits_of(model), before)
    return before, after, weights


def loaded_weights(directory: str, layout: Layout, **overrides: Any) -> dict[str, Tensor]:
    """This rank's weights of a directory."""
    return {name: p.detach().clone() for name, p in build(directory, layout, **overrides).named_parameters()}


class Tune(pl.LightningModule):
    """Trains a tiny model of a family, from a PEFT adapter if one is given."""

    def __init__(self, directory: str, adapter: str | None = None) -> None:
        super().__init__()
        self.directory, self.adapter, self.gpt = directory, adapter, None

    def configure_model(self) -> None:
        from lightning_mcore_lora import build_gpt_model, load_hf_weights, load_peft_adapter

        if self.gpt is None:
            parallel = self.trainer.strategy.parallel
            self.gpt = build_gpt_model(self.directory, parallel)
            load_hf_weights(self.gpt, self.directory, parallel)
            if self.adapter is not None:
                load_peft_adapter(self, self.adapter)

    def on_fit_start(self) -> None:
        if self.adapter is None and self.trainer.global_step == 0:
            shake(self.gpt)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.gpt, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.cat([families.tokens(i) for i in range(3)]), batch_size=families.BATCH)


def fit(
    directory: str,
    layout: Layout,
    checkpoint: str,
    lora: dict[str, Any] | None,
    out: str | None,
    adapter: str | None = None,
    resume: str | None = None,
    **options: Any,
) -> Tensor:
    """An epoch of three steps of a Trainer, saved as a checkpoint and as a PEFT adapter; the logits."""
    from lightning_mcore_lora import LoRASPCallback, MCoreTP, cpu_backend, save_peft_adapter

    tp, ep, etp = layout
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=MCoreTP(tensor_parallel_size=tp, expert_parallel_size=ep, expert_tensor_parallel_size=etp),
        callbacks=[] if lora is None else [LoRASPCallback(**lora, verbose=False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({"max_epochs": 1} | options),
    )
    module = Tune(directory, adapter)
    trainer.fit(module, ckpt_path=resume)
    trainer.save_checkpoint(checkpoint)
    if out is not None:
        save_peft_adapter(module, out)
    with cpu_backend.active():
        return logits_of(module.gpt.eval())
