"""Precision: what is cast, what is kept in float32, and what all ranks must agree on."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from megatron.core.tensor_parallel import layers, random
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.models.marks import master_of

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
#: Marks of Megatron-Core on a parameter, by which it is reduced, counted and saved.
_MARKS = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "allreduce",
    "experts",
    "is_vocabulary",
    "sequence_parallel",
)


def check_precision(precision: Any) -> None:
    """Check Lightning's ``precision`` setting.

    Raises:
        NotImplementedError: If it is not supported, naming those that are.
    """
    if str(precision) not in SUPPORTED:
        raise NotImplementedError(f"precision={str(precision)!r} is not supported by MCoreTP: use one of {SUPPORTED}")


def convert(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module's parameters in place, but keep the adapters' factors in float32.

    Buffers are left alone: Megatron-Core keeps the ones it has in the dtype that it needs.
    """
    kept = {id(p) for _, adapter in adapters(module) for p in adapter.parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    return module


class HalfPrecision(FabricHalfPrecision):
    """Fabric's ``bf16-true``, which would cast the adapters too."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast all but adapters."""
        return convert(module, self._desired_input_dtype)


def for_fabric(precision: FabricPrecision | None) -> FabricPrecision | None:
    """The plugin to use in place of Fabric's own."""
    return HalfPrecision("bf16-true") if getattr(precision, "precision", None) == "bf16-true" else precision


def agree_on_overflow(plugin: Any) -> None:
    """Have a gradient scaler skip a step on every rank if any rank found an overflow."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or isinstance(scaler, ShardedGradScaler):
        return
    plugin.scaler = ShardedGradScaler(
        device=plugin.device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
        process_group=torch.distributed.group.WORLD,
    )


def mend_autocast() -> None:
    """Have Megatron-Core do under autocast what torch's own layers do; without autocast nothing changes.

    Its activation checkpoints compute again in backward, which runs outside of autocast: products would meet float32
    weights and half-precision activations, or be done in float32, and gradients would not be those of the forward that
    ran. Its linears that train keep a float32 input, and reduce half-precision gradients into a buffer of its dtype.
    """
    for function in (random.CheckpointFunction, random.CheckpointWithoutOutputFunction):
        if not hasattr(function.forward, "__wrapped__"):
            function.forward = staticmethod(_recomputed_alike(function.forward))
    name = "linear_with_grad_accumulation_and_async_allreduce"
    if not hasattr(getattr(layers, name), "__wrapped__"):
        setattr(layers, name, _with_cast_input(getattr(layers, name)))


def _autocast() -> tuple[str, torch.dtype] | None:
    """Device and dtype of the autocast that is on."""
    return next(((d, torch.get_autocast_dtype(d)) for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)


def _recomputed_alike(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapped(ctx: Any, run_function: Callable, *args: Any) -> Any:
        autocast = _autocast()
        return forward(ctx, torch.autocast(*autocast)(run_function) if autocast else run_function, *args)

    return wrapped


def _with_cast_input(linear: Callable) -> Callable:
    @functools.wraps(linear)
    def wrapped(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        autocast = _autocast()
        return linear(input.to(autocast[1]) if autocast else input, *args, **kwargs)

    return wrapped


def check_scalable(plugin: Any, optimizer: Optimizer) -> None:
    """Check that an optimizer leaves unscaling to the gradient scaler, if there is one.

    Raises:
        NotImplementedError: If it unscales by itself: ranks would not agree on what to skip.
    """
    if getattr(plugin, "scaler", None) is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise NotImplementedError(
            f"{type(optimizer).__name__}(fused=True) is not supported with precision='16-mixed': it looks for "
            "overflows on its own rank only. Leave fused out, or use bf16-mixed"
        )


def loss_scale(plugin: Any) -> float:
    """What the plugin's gradient scaler multiplies a loss with."""
    scaler = getattr(plugin, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(parameter.detach().float())
    for name in _MARKS:
        if hasattr(parameter, name):
            setattr(master, name, getattr(parameter, name))
    return master


class Masters:
    """Float32 stand-ins for trainable parameters of lower precision.

    The optimizer trains the stand-ins; after each step the parameters are their rounded copies. Float32 parameters,
    adapters among them, stand for themselves.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def stand_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the masters of these parameters; one that is there stays, unless its parameter was set since."""
        before, self._pairs = self._pairs, {}
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                vars(parameter).pop("float32_master", None)
                continue
            pair = before.get(id(parameter))
            if pair is None or not torch.equal(pair[1].to(parameter.dtype), parameter):
                pair = (parameter, _master(parameter))
            self._pairs[id(parameter)] = pair
            parameter.float32_master = pair[1]  # type: ignore[attr-defined]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer trains for ``parameter``."""
        return master_of(parameter)

    def give_to(self, optimizer: Optimizer) -> None:
        """Put the masters into an optimizer that was made with the parameters."""
        for group in optimizer.param_groups:
            group["params"] = [self.of(parameter) for parameter in group["params"]]

    @torch.no_grad()
    def copy_back(self) -> None:
        """Round the masters into the parameters."""
        for parameter, master in self._pairs.values():
            parameter.copy_(master)

    @torch.no_grad()
    def load(self, parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        """Set parameters and their masters by name."""
        for name, value in values.items():
            self.of(parameters[name]).copy_(value)
        self.copy_back()
