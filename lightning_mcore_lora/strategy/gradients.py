"""Gradients: reduction through Megatron-Core's DDP, token weighting, global norm."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.parallel import ParallelContext


def find_config(module: nn.Module) -> TransformerConfig:
    """The Megatron-Core config of the first model found inside ``module``.

    Raises:
        ValueError: If there is none.
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        if isinstance(config, TransformerConfig):
            return config
    raise ValueError(
        f"{type(module).__name__} holds no Megatron-Core model: build one in configure_model, for example with "
        "build_gpt_model(directory, self.trainer.strategy.parallel)"
    )


class GradientReducer:
    """Reduces the gradients of a module's trainable parameters, once per optimizer step.

    Megatron-Core's ``DistributedDataParallel`` collects them in ``main_grad`` buffers; ``finalize_model_grads`` sums
    them over the data-parallel group (and what sequence parallelism left partial over the tensor-parallel group). The
    buffers always hold sums: a mean over microbatches or a weighting by tokens is one scaling at the end.

    Args:
        module: Any module that holds a Megatron-Core model; its parameters must be frozen or not for good.
        parallel: The layout.

    Raises:
        ValueError: If nothing is trainable.
    """

    def __init__(self, module: nn.Module, parallel: ParallelContext) -> None:
        self._parallel = parallel
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError(
                f"{type(module).__name__} has no trainable parameter: add LoRASPCallback(), or unfreeze something"
            )
        config = copy.copy(find_config(module))
        self._aux_loss_per_token = config.calculate_per_token_loss
        config.calculate_per_token_loss = True  # DDP then sums and never divides
        self._ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), module)
        self._adapters = [adapter for _, adapter in adapters(module)]
        for adapter in self._adapters:
            adapter.defer_sums(True)
        self._plain_losses = 0
        self._token_losses = 0
        self._num_tokens: Tensor | None = None

    def scale_loss(self, loss: Tensor, num_tokens: Tensor | int | None, accumulate: int) -> Tensor:
        """Prepare a microbatch's loss for backward, and Megatron-Core's auxiliary losses to match.

        Args:
            loss: What the training step returned.
            num_tokens: Tokens that the loss sums over; ``None`` if the loss is a mean.
            accumulate: Microbatches in this optimizer step, by which the trainer divides the loss afterwards.

        Returns:
            The loss to hand to the trainer.
        """
        if num_tokens is None:
            self._plain_losses += 1
            aux_scale = loss.new_tensor(1.0 / accumulate)
        else:
            tokens = torch.as_tensor(num_tokens, dtype=torch.int64, device=loss.device).detach().reshape(())
            self._token_losses += 1
            self._num_tokens = tokens if self._num_tokens is None else self._num_tokens + tokens
            # With calculate_per_token_loss the router counts its tokens itself.
            aux_scale = loss.new_tensor(1.0) if self._aux_loss_per_token else tokens.to(loss.dtype)
            loss = loss * accumulate
        MoEAuxLossAutoScaler.set_loss_scale(aux_scale)
        return loss

    def finalize(self) -> None:
        """Reduce and scale the gradients and hand them to ``parameter.grad``. A collective over all processes.

        Raises:
            ValueError: If microbatches of one step, on any rank, differ in whether they give ``num_tokens``.
        """
        finalize_model_grads([self._ddp])
        # Counted over all replicas first, so that one that skipped its microbatches decides as the others do.
        tokens = 0 if self._num_tokens is None else self._num_tokens
        counts = torch.tensor([self._plain_losses, self._token_losses, tokens], device=self._parameters[0].device)
        if self._parallel.sizes.data > 1:
            torch.distributed.all_reduce(counts, group=self._parallel.dp_group)
        plain_losses, token_losses, num_tokens = counts.tolist()
        if plain_losses and token_losses:
            raise ValueError(
                "training_step returned num_tokens for some microbatches of an optimizer step and not for others: "
                "return {'loss': summed, 'num_tokens': n} always, or a mean always"
            )
        self._ddp.scale_gradients(1.0 / (max(num_tokens, 1) if token_losses else self._parallel.sizes.data))
        for parameter in self._parameters:
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Empty the buffers. Must follow each step: a gradient left aliased would be accumulated twice by the next."""
        for parameter in self._parameters:
            parameter.grad = None
        self._ddp.zero_grad_buffer()
        self._plain_losses, self._token_losses, self._num_tokens = 0, 0, None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates."""
        with self._ddp.no_sync():
            yield

    def close(self) -> None:
        """Disable the hooks on the parameters and free the buffers."""
        # A hook holds the DDP object, and lives as long as any graph through its parameter. Without an entry here it
        # does nothing; without the rest it holds nothing.
        self._ddp.param_to_bucket_group.clear()
        self._ddp.grad_accs.clear()
        for name in ("buffers", "bucket_groups", "expert_parallel_buffers", "expert_parallel_bucket_groups"):
            setattr(self._ddp, name, [])
        del self._ddp.module
        for adapter in self._adapters:
            adapter.defer_sums(False)
        for parameter in self._parameters:
            parameter.grad = None
            for name in ("main_grad", "grad_added_to_main_grad"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


def global_grad_norm(parameters: Iterable[nn.Parameter], parallel: ParallelContext) -> Tensor:
    """The 2-norm of all gradients together, each logical element counted once, equal on every rank.

    Sharded parameters are summed over the processes that hold the other shards; replicated ones count once. Experts
    have their own groups.

    Args:
        parameters: Parameters; those without a gradient are passed over.
        parallel: The layout.

    Returns:
        A scalar.
    """
    squares: dict[str, list[Tensor]] = {"replicated": [], "tensor": [], "expert": [], "expert_sharded": []}
    device = None
    for parameter in parameters:
        device = parameter.device if device is None else device
        sharded = getattr(parameter, "tensor_model_parallel", False)
        if getattr(parameter, "allreduce", True):
            kind = "tensor" if sharded else "replicated"
        else:
            kind = "expert_sharded" if sharded else "expert"
        # A kind is present on all ranks or on none; a missing gradient must not make the ranks disagree on it.
        grad = parameter.grad
        squares[kind].append(torch.zeros((), device=device) if grad is None else grad.norm().square())
    groups = {"tensor": parallel.tp_group, "expert": parallel.ep_group, "expert_sharded": parallel.expert_model_group}
    total = torch.zeros((), device=device)
    for kind, values in squares.items():
        if not values:
            continue
        square = torch.stack(values).sum()
        if kind in groups and groups[kind].size() > 1:
            torch.distributed.all_reduce(square, group=groups[kind])
        total = total + square
    return total.sqrt()


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, parallel: ParallelContext) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``.

    Args:
        parameters: Parameters with gradients.
        max_norm: The bound.
        parallel: The layout.

    Returns:
        The norm before.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, parallel)
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
