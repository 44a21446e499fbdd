"""What workers run: the tiny Llama trained by the Trainer through the package."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_mcore_lora import LoRASPCallback, MCoreTP, build_gpt_model, load_hf_weights
from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.strategy.gradients import global_grad_norm
from tests import tiny

CLIP = 0.5


class TinyModule(pl.LightningModule):
    """Trains the tiny Llama and records what the oracle knows."""

    def __init__(self, directory: str, token_weights: Tensor | None = None, random_factors: bool = True) -> None:
        super().__init__()
        self.directory = directory
        self.token_weights = token_weights
        self.random_factors = random_factors
        self.model: Any = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[tuple[str, str], Tensor]] = []
        self.inputs: list[Tensor] = []

    def configure_model(self) -> None:
        if self.model is None:
            parallel = self.trainer.strategy.parallel
            self.model = build_gpt_model(self.directory, parallel)
            load_hf_weights(self.model, self.directory, parallel)
            self.model.decoder.register_forward_pre_hook(self._watch_input, with_kwargs=True)

    def _watch_input(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"]
        if self.training and torch.is_grad_enabled():
            self.inputs.append(hidden.requires_grad_())
            hidden.retain_grad()

    def on_fit_start(self) -> None:
        if self.random_factors and self.trainer.global_step == 0:
            set_random_factors(self.model)

    def forward(self, samples: Tensor) -> Tensor:
        ids = samples[:, :-1].contiguous()
        positions = torch.arange(ids.shape[1])[None].expand_as(ids)
        return self.model(ids, positions, None, labels=samples[:, 1:].contiguous())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        samples, index = batch
        losses = self(samples)
        if self.token_weights is None:
            loss = losses.mean()
            self.losses.append(loss.item())
            return loss
        mask = self.token_weights[index]
        loss = (losses * mask).sum()
        self.losses.append(loss.item())
        return {"loss": loss, "num_tokens": int(mask.sum())}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(global_grad_norm(self.parameters(), self.trainer.strategy.parallel).item())
        self.gradients.append({key: p.grad.clone() for key, p in factors_of(self.model).items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=tiny.ADAM_EPS)

    def train_dataloader(self) -> DataLoader:
        samples = tiny.tokens()
        dataset = TensorDataset(samples, torch.arange(len(samples)))
        # Lightning's own sampler would shuffle.
        sampler = DistributedSampler(dataset, shuffle=False, **self.trainer.strategy.distributed_sampler_kwargs)
        return DataLoader(dataset, batch_size=2 // self.trainer.strategy.parallel.sizes.data, sampler=sampler)


def factors_of(model: torch.nn.Module) -> dict[tuple[str, str], torch.nn.Parameter]:
    """(path of the linear, "a" or "b") to parameter."""
    return {(a.site.name, name): p for _, a in adapters(model) for name, p in a.named_parameters()}


def set_random_factors(model: torch.nn.Module) -> None:
    """Give the adapters the factors of the oracle."""
    for _, adapter in adapters(model):
        layer, site = int(adapter.site.name.split("layers.")[1].split(".")[0]), adapter.site.leaf
        values = tiny.factors(layer, site)
        adapter.load_full(values.a, tiny.fuse_rows(site, values.b))


def trainer(strategy: MCoreTP, mode: str, *, callbacks: tuple = (), **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer over the processes of this call."""
    lora = LoRASPCallback(rank=tiny.RANK, alpha=tiny.ALPHA, sequence_mode=mode, verbose=False)
    defaults = {
        "max_steps": tiny.STEPS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": CLIP,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        callbacks=[lora, *callbacks],
        **(defaults | kwargs),
    )


def train(directory: str, tp: int, sequence: bool, mode: str, token_weights: Tensor | None = None) -> dict[str, Any]:
    """Five steps; returns this rank's view."""
    strategy = MCoreTP(tensor_parallel_size=tp, sequence_parallel=sequence)
    module = TinyModule(directory, token_weights)
    trainer(strategy, mode).fit(module)
    parallel = strategy.parallel
    factors = factors_of(module.model)
    return {
        "tp_rank": parallel.tp_rank,
        "dp_rank": parallel.dp_rank,
        "losses": module.losses,
        "norms": module.norms,
        "input_gradient": module.inputs[0].grad,
        "gradients": module.gradients,
        "factors": {key: p.detach().clone() for key, p in factors.items()},
        "marks": {key: (p.tensor_model_parallel, p.partition_dim, p.partition_stride) for key, p in factors.items()},
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad and p.grad is not None],
    }
