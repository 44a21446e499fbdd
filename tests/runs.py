"""What workers run: the tiny Llama trained by the Trainer through the package."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_mcore_lora import LoRAConfig, LoRASPCallback, MCoreTP, apply_lora, build_gpt_model, load_hf_weights
from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.parallel import ParallelContext
from lightning_mcore_lora.strategy.gradients import global_grad_norm
from tests import tiny
from tests.workers import AT_END

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
            watch_input(self.model, self.inputs)

    def on_fit_start(self) -> None:
        if self.random_factors and self.trainer.global_step == 0:
            set_random_factors(self.model)

    def forward(self, samples: Tensor) -> Tensor:
        return token_losses(self.model, samples)

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
        self.norms.append(global_grad_norm(self.parameters()).item())
        self.gradients.append({key: p.grad.clone() for key, p in factors_of(self.model).items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=tiny.ADAM_EPS)

    def train_dataloader(self) -> DataLoader:
        return loader(self.trainer.strategy)


def watch_input(model: Any, inputs: list[Tensor]) -> None:
    """Keep the first hidden states of each training step, and their gradients."""

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"]
        if module.training and torch.is_grad_enabled():
            inputs.append(hidden.requires_grad_())
            hidden.retain_grad()

    model.decoder.register_forward_pre_hook(watch, with_kwargs=True)


def token_losses(model: Any, samples: Tensor) -> Tensor:
    """Loss of each token, ``[batch, sequence]``."""
    ids = samples[:, :-1].contiguous()
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    return model(ids, positions, None, labels=samples[:, 1:].contiguous())


def loader(strategy: MCoreTP) -> DataLoader:
    """The samples in the oracle's order; two a microbatch over all data-parallel ranks."""
    samples = tiny.tokens()
    dataset = TensorDataset(samples, torch.arange(len(samples)))
    # Lightning's own sampler would shuffle.
    sampler = DistributedSampler(dataset, shuffle=False, **strategy.distributed_sampler_kwargs)
    return DataLoader(dataset, batch_size=2 // strategy.parallel.sizes.data, sampler=sampler)


def factors_of(model: torch.nn.Module) -> dict[tuple[str, str], torch.nn.Parameter]:
    """(path of the linear, "a" or "b") to parameter."""
    return {(a.site.name, name): p for _, a in adapters(model) for name, p in a.named_parameters()}


def set_random_factors(model: torch.nn.Module) -> None:
    """Give the adapters the factors of the oracle."""
    for _, adapter in adapters(model):
        layer, site = int(adapter.site.name.split("layers.")[1].split(".")[0]), adapter.site.leaf
        values = tiny.factors(layer, site)
        adapter.load_full(values.a, tiny.fuse_rows(site, values.b))


def trainer(strategy: MCoreTP, mode: str | None, *, callbacks: tuple = (), **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer over the processes of this call; ``mode=None`` is without adapters."""
    lora = [LoRASPCallback(rank=tiny.RANK, alpha=tiny.ALPHA, sequence_mode=mode, verbose=False)] if mode else []
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
        callbacks=[*lora, *callbacks],
        **(defaults | kwargs),
    )


def train(
    directory: str,
    tp: int,
    sequence: bool,
    mode: str,
    token_weights: Tensor | None = None,
    precision: str = "32-true",
) -> dict[str, Any]:
    """Five steps; returns this rank's view."""
    strategy = MCoreTP(tensor_parallel_size=tp, sequence_parallel=sequence)
    module = TinyModule(directory, token_weights)
    # On the CPU the Trainer would take bf16-mixed for 16-mixed, unless it is given the plugin.
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**10))
    half = {"plugins": [plugin]} if precision == "16-mixed" else {"precision": precision}
    trainer(strategy, mode, **half).fit(module)
    return {
        **view(module.model, strategy.parallel),
        "losses": module.losses,
        "norms": module.norms,
        "input_gradient": module.inputs[0].grad,
        "gradients": module.gradients,
    }


class FullModule(TinyModule):
    """Trains every weight, without adapters."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, random_factors=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        trained = self.trainer.strategy.engine.tensors(self.model).trained
        self.norms.append(global_grad_norm(trained.values()).item())
        self.gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})


def train_full(directory: str, tp: int, sequence: bool, precision: str = "32-true") -> dict[str, Any]:
    """Five steps of full fine-tuning; returns this rank's view."""
    strategy = MCoreTP(tensor_parallel_size=tp, sequence_parallel=sequence)
    module = FullModule(directory)
    trainer(strategy, None, precision=precision).fit(module)
    trained = strategy.engine.tensors(module.model).trained
    return {
        **places(trained, strategy.parallel),
        "norms": module.norms,
        "gradients": module.gradients,
        "weights": {name: p.detach().clone() for name, p in trained.items()},
    }


def places(parameters: dict[Any, torch.nn.Parameter], parallel: ParallelContext) -> dict[str, Any]:
    """This rank's place, and where its part of each parameter belongs in the whole one."""
    marks = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
    return {
        "tp_rank": parallel.tp_rank,
        "dp_rank": parallel.dp_rank,
        "marks": {key: tuple(getattr(p, *mark) for mark in marks.items()) for key, p in parameters.items()},
    }


def view(model: torch.nn.Module, parallel: ParallelContext) -> dict[str, Any]:
    """This rank's factors, and where they belong."""
    factors = factors_of(model)
    return {
        **places(factors, parallel),
        "factors": {key: p.detach().clone() for key, p in factors.items()},
        "frozen": [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None],
    }


def fabric(strategy: MCoreTP, **kwargs: Any) -> Fabric:
    """Fabric over the processes of this call; it has no end of its own."""
    AT_END.append(strategy.engine.stop)
    fabric = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


def model_for_fabric(fabric: Fabric, directory: str, mode: str, in_setup: bool = False) -> Any:
    """The tiny Llama with the oracle's factors; adapters are put in now, or by the strategy in set-up."""
    with fabric.init_module():
        model = build_gpt_model(directory, fabric.strategy.parallel)
        load_hf_weights(model, directory, fabric.strategy.parallel)

    def adapt(model: torch.nn.Module) -> None:
        apply_lora(model, LoRAConfig(rank=tiny.RANK, alpha=tiny.ALPHA, sequence_mode=mode))
        set_random_factors(model)

    fabric.strategy.register_transform(adapt) if in_setup else adapt(model)
    return model


def train_fabric(
    directory: str,
    tp: int,
    sequence: bool,
    mode: str,
    token_weights: Tensor | None = None,
    precision: str = "32-true",
    in_setup: bool = False,
) -> dict[str, Any]:
    """The same five steps, in a loop of one's own."""
    strategy = MCoreTP(tensor_parallel_size=tp, sequence_parallel=sequence)
    f = fabric(strategy, precision=precision)
    model = model_for_fabric(f, directory, mode, in_setup)
    inputs: list[Tensor] = []
    watch_input(model, inputs)
    if in_setup:
        model = f.setup_module(model)
        optimizer = f.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=tiny.ADAM_EPS))
    else:
        model, optimizer = f.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=tiny.ADAM_EPS))
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for i, (samples, index) in enumerate(f.setup_dataloaders(loader(strategy), use_distributed_sampler=False)):
        accumulating = i % 2 == 0
        with f.no_backward_sync(model, enabled=accumulating):
            losses = token_losses(model, samples)
            if token_weights is None:
                loss = losses.mean()
                f.backward(loss / 2)
            else:
                mask = token_weights[index]
                loss = (losses * mask).sum()
                f.backward(loss, num_tokens=int(mask.sum()))
        result["losses"].append(loss.item())
        if not accumulating:
            result["norms"].append(f.clip_gradients(model, optimizer, max_norm=1e30).item())
            result["gradients"].append({key: p.grad.clone() for key, p in factors_of(model).items()})
            f.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return {**view(model, strategy.parallel), **result, "input_gradient": inputs[0].grad}
