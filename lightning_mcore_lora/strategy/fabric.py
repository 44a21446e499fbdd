"""The face that Fabric sees."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _PATH, _Stateful
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.checkpoint.errors import CheckpointError
from lightning_mcore_lora.strategy import launchers
from lightning_mcore_lora.strategy.engine import Engine
from lightning_mcore_lora.strategy.loaders import CountingLoader, ResumableLoader
from lightning_mcore_lora.strategy.precision import (
    agree_on_overflow,
    check_precision,
    check_scalable,
    for_fabric,
    loss_scale,
)
from lightning_mcore_lora.strategy.processes import Processes


class NoSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return self._engine.no_sync() if enabled else nullcontext()


class FabricFace(Processes, ParallelStrategy):
    """Speaks Fabric's words to the engine."""

    # -- set-up -------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        self._launch_with(launchers.FABRIC)

    @property
    def precision(self) -> Precision:
        """Fabric's precision plugin."""
        return Precision() if self._precision is None else self._precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._precision = for_fabric(plugin)

    @override
    def setup_environment(self) -> None:
        check_precision(self.precision.precision)
        super().setup_environment()
        agree_on_overflow(self.precision)

    @override
    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        if not any(p.requires_grad for p in module.parameters()):
            return module  # a model to look at
        self.engine.transform(module)
        if self.engine.reducer is not None:
            raise NotImplementedError(
                f"{type(self).__name__} reduces the gradients of one model, and {type(module).__name__} is the second "
                "with trainable parameters: hold both in one nn.Module, or freeze one"
            )
        self.engine.prepare(module, {"precision": self.precision.precision})
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.engine.reducer is None:
            raise RuntimeError("set up the model before its optimizer: fabric.setup(model, optimizer)")
        check_scalable(self.precision, optimizer)
        self.engine.adopt(optimizer)
        return optimizer

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        if len(optimizers) > 1:
            raise NotImplementedError(
                f"fabric.setup got {len(optimizers)} optimizers; {type(self).__name__} reduces all gradients at one "
                "step: give one optimizer with parameter groups"
            )
        module = self.setup_module(module)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    @override
    def process_dataloader(self, dataloader: DataLoader) -> Any:
        self.engine.share_out(dataloader)
        return (
            dataloader
            if hasattr(dataloader, "state_dict")
            else CountingLoader(dataloader, self.root_device, self.parallel.sizes.data)
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def backward(
        self,
        tensor: Tensor,
        module: nn.Module | None,
        *args: Any,
        num_tokens: Tensor | int | None = None,
        microbatches: int = 1,
        **kwargs: Any,
    ) -> None:
        reducer = self.engine.reducer
        if reducer is None:
            raise RuntimeError("backward before fabric.setup(model, optimizer) set a trainable model up")
        accumulate = microbatches if num_tokens is None else 1  # a sum is not divided
        tensor = reducer.before_backward(tensor, num_tokens, accumulate, loss_scale(self.precision))
        ParallelStrategy.backward(self, tensor, module, *args, **kwargs)
        reducer.after_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        with self.engine.stepping(optimizer):
            if "closure" in kwargs:
                kwargs["closure"] = self.engine.reduced_after(kwargs["closure"])
            else:
                self._reduce_gradients()
            return ParallelStrategy.optimizer_step(self, optimizer, **kwargs)

    def _reduce_gradients(self) -> None:
        assert self.engine.reducer is not None
        self.engine.reducer.finalize()

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self._reduce_gradients()
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return self.engine.clip_grad_norm(parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self._reduce_gradients()
        ParallelStrategy.clip_gradients_value(self, module, optimizer, clip_val)

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} saves directories and takes no storage_options")
        model, optimizers, loaders = self._split(state)
        keep = filter or {}
        if keep.keys() & optimizers.keys():
            raise NotImplementedError("filter: an optimizer is saved whole or not at all; leave it out of the state")
        tensors = self.engine.tensors(nn.Module() if model is None else state[model])
        left_out = {name for name, p in tensors.all.items() if model in keep and not keep[model](name, p)}
        values = {}
        for key, value in state.items():
            if not isinstance(value, nn.Module | Optimizer):
                values[key] = value.state_dict() if isinstance(value, _Stateful) else value
                if key in keep:
                    values[key] = {name: item for name, item in values[key].items() if keep[key](name, item)}
        scaler = self.precision.state_dict()
        rest = {"values": values, "model": model, "optimizers": list(optimizers), "precision": scaler}
        self.engine.save(str(path), rest, tensors, list(optimizers.values()), list(loaders.values()), left_out=left_out)

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not state or isinstance(state, Optimizer):
            raise ValueError(
                f"{type(self).__name__} loads shards into what is there: give fabric.load(path, state) a dictionary "
                "with the model (and the optimizer), or a model to fabric.load_raw"
            )
        if isinstance(state, nn.Module):
            self.engine.load_weights(state, self.engine.load(str(path), self.engine.tensors(state), [], strict).weights)
            return {}
        model, optimizers, loaders = self._split(state)
        tensors = self.engine.tensors(nn.Module() if model is None else state[model])
        loaded = self.engine.load(
            str(path), tensors, list(optimizers.values()), strict and model is not None, bool(loaders)
        )
        if "values" not in loaded.rest:
            raise CheckpointError(
                f"{path} was not written by Fabric: its weights can be read by fabric.load_raw(path, model)"
            )
        values = loaded.rest["values"]
        saved = {*values, *loaded.rest["optimizers"], *([loaded.rest["model"]] if loaded.rest["model"] else [])}
        frozen = {key for key, value in state.items() if isinstance(value, nn.Module) and key != model}
        _validate_keys_for_strict_loading(state.keys() - frozen, saved, strict=strict)
        if model is not None:
            self.engine.load_weights(state[model], loaded.weights)
        if optimizers:
            self.precision.load_state_dict(loaded.rest["precision"])
        for optimizer, optimizer_state in zip(optimizers.values(), loaded.optimizer_states, strict=False):
            optimizer.load_state_dict(optimizer_state)
        for key in [key for key in state if key in values]:
            if isinstance(state[key], _Stateful):
                state[key].load_state_dict(values.pop(key))
            else:
                state[key] = values.pop(key)
        self.engine.continue_streams(list(loaders.values()))
        return values

    def _split(self, state: dict[str, Any]) -> tuple[str | None, dict[str, Optimizer], dict[str, ResumableLoader]]:
        """The key of the trainable model, or else of one that has adapters; optimizers and loaders by key."""
        modules = {k: v for k, v in state.items() if isinstance(v, nn.Module)}
        models = [k for k, v in modules.items() if any(p.requires_grad for p in v.parameters())]
        models = models or [k for k, v in modules.items() if next(adapters(v), None)]
        if len(models) > 1:
            raise NotImplementedError(f"the state holds several trainable models: {models}")
        optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
        if optimizers and not models:
            raise ValueError(f"the state holds {list(optimizers)} without the model: its parameters name the state")
        loaders = {k: v for k, v in state.items() if isinstance(v, ResumableLoader)}
        return next(iter(models), None), optimizers, loaders
