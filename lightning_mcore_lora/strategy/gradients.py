"""Gradients: reduction through Megatron-Core's DDP, token weighting, global norm."""

import copy
import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_mcore_lora.adapters import adapters, raise_unreached
from lightning_mcore_lora.parallel import ParallelContext, shard_group
from lightning_mcore_lora.strategy.precision import Masters


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
        f"{type(module).__name__} holds no Megatron-Core model: build one in configure_model (in Fabric: after "
        "launch), for example with build_gpt_model(directory, strategy.parallel)"
    )


class GradientReducer:
    """Reduces the gradients of a module's trainable parameters, once per optimizer step.

    Megatron-Core's ``DistributedDataParallel`` collects them in float32 ``main_grad`` buffers; ``finalize_model_grads``
    sums them over the data-parallel group (and what sequence parallelism left partial over the tensor-parallel group).
    The buffers always hold sums: a mean over microbatches or a weighting by tokens is one scaling at the end.

    Between a backward and the next, ``grad`` of what the optimizer trains is the buffer, so hooks and clipping see it,
    and dropping it (``optimizer.zero_grad()``) empties the buffer.

    Args:
        module: Any module that holds a Megatron-Core model; its parameters must be frozen or not for good.
        parallel: The layout.
        masters: What is trained in place of parameters of less than float32.

    Raises:
        ValueError: If nothing is trainable.
    """

    def __init__(self, module: nn.Module, parallel: ParallelContext, masters: Masters) -> None:
        self._parallel = parallel
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError(
                f"{type(module).__name__} has no trainable parameter: add LoRASPCallback() (in Fabric: apply_lora), "
                "or unfreeze something"
            )
        self._trained = [masters.of(p) for p in self._parameters]
        self._ids = {id(p) for p in self._trained}
        self._held = self._trained  # what zero_grad() of the optimizer reaches
        config = copy.copy(find_config(module))
        config.calculate_per_token_loss = True  # DDP then sums and never divides
        # Megatron-Core would move this buffer of routers at the end of a step; it is the frozen base's.
        config.moe_router_enable_expert_bias = False
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, grad_reduce_in_fp32=True)
        self._ddp = DistributedDataParallel(config, ddp_config, module)
        # Routers would scale their auxiliary losses by token counts of their own, which miss the mask (and, in
        # Megatron-Core 0.16, the tensor-parallel peers' tokens): here they scale by what the loss is given with.
        self._routers = [(m, m.calculate_per_token_loss) for m in module.modules() if isinstance(m, TopKRouter)]
        for router, _ in self._routers:
            router.calculate_per_token_loss = False
        self._adapters = [adapter for _, adapter in adapters(module)]
        for adapter in self._adapters:
            adapter.defer_sums(True)
        self._unreached = {i: adapter.site.name for i, adapter in enumerate(self._adapters) if adapter.b.requires_grad}
        self._watches = [
            self._adapters[i].b.register_hook(functools.partial(self._reached, i)) for i in self._unreached
        ]
        self._plain_losses = 0
        self._token_losses = 0
        self._num_tokens: Tensor | None = None
        self._holds = False  # grad is the buffer now
        self._finalized = False
        self.is_accumulating = False

    def before_backward(
        self, loss: Tensor, num_tokens: Tensor | int | None, accumulate: int = 1, loss_scale: float = 1.0
    ) -> Tensor:
        """Prepare a microbatch's loss for backward, and Megatron-Core's auxiliary losses to match.

        Args:
            loss: What the training step returned, divided by ``accumulate``.
            num_tokens: Tokens that the loss sums over; ``None`` if the loss is a mean.
            accumulate: Microbatches in this optimizer step, by which the loss was divided.
            loss_scale: What a gradient scaler will multiply the loss with.

        Returns:
            The loss to go backward from.

        Raises:
            RuntimeError: If the gradients of this step were reduced already.
            ValueError: If ``num_tokens`` is of a dtype that rounds.
        """
        self._drop_unwanted()
        if self._finalized:
            raise RuntimeError(
                "backward after the gradients were reduced for clipping: clip once per optimizer step, after its last "
                "backward, and call optimizer.step() (or zero_grad()) before the next"
            )
        for trained in self._trained:  # left in place, a gradient would be accumulated twice
            trained.grad = None
        self._holds = False
        if num_tokens is None:
            self._plain_losses += 1
            aux_scale = loss.new_tensor(loss_scale / accumulate)
        else:
            if isinstance(num_tokens, Tensor) and num_tokens.is_floating_point() and num_tokens.element_size() < 4:
                raise ValueError(
                    f"num_tokens is {num_tokens.dtype}, which does not hold every count: sum the mask in another, "
                    "mask.sum(dtype=torch.float32)"
                )
            tokens = torch.as_tensor(num_tokens, dtype=torch.int64, device=loss.device).detach().reshape(())
            self._token_losses += 1
            self._num_tokens = tokens if self._num_tokens is None else self._num_tokens + tokens
            aux_scale = loss_scale * tokens.float()
            loss = loss * accumulate
        MoEAuxLossAutoScaler.set_loss_scale(aux_scale)
        return loss

    def after_backward(self) -> None:
        """Let ``grad`` be the buffer."""
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            trained.grad = parameter.main_grad  # type: ignore[attr-defined]
        self._holds = True

    def _drop_unwanted(self) -> None:
        """Empty the buffers if ``zero_grad()`` was called since the last backward."""
        if self._holds and all(held.grad is None for held in self._held):
            self.clear()

    def _reached(self, index: int, grad: Tensor) -> None:
        self._unreached.pop(index, None)

    def finalize(self) -> None:
        """Reduce and scale the gradients in ``grad``, if that is not done yet. A collective over all processes.

        Raises:
            ValueError: If microbatches of one step, on any rank, differ in whether they give ``num_tokens``.
            RuntimeError: If after the first step with a backward an adapter has got no gradient, naming its site.
        """
        self._drop_unwanted()
        if self._finalized:
            return
        if self._watches and self._plain_losses + self._token_losses:
            for watch in self._watches:
                watch.remove()
            self._watches = []
            raise_unreached(self._unreached.values())
        finalize_model_grads([self._ddp])
        self._sum_experts()
        # Counted over all replicas first, so that one that skipped its microbatches decides as the others do.
        tokens = 0 if self._num_tokens is None else self._num_tokens
        counts = torch.tensor([self._plain_losses, self._token_losses, tokens], device=self._parameters[0].device)
        if self._parallel.sizes.data > 1:
            torch.distributed.all_reduce(counts, group=self._parallel.dp_group)
        plain_losses, token_losses, num_tokens = counts.tolist()
        if plain_losses and token_losses:
            raise ValueError(
                "num_tokens was given for some microbatches of an optimizer step and not for others: "
                "return {'loss': summed, 'num_tokens': n} always, or a mean always"
            )
        self._ddp.scale_gradients(1.0 / (max(num_tokens, 1) if token_losses else self._parallel.sizes.data))
        self.after_backward()
        self._finalized = True

    def _sum_experts(self) -> None:
        """Sum what adapters of experts have only a part of: one all-reduce for each group."""
        by_group: dict[ProcessGroup, list[Tensor]] = {}
        for adapter in self._adapters:
            for parameter, group in adapter.deferred_sums():
                by_group.setdefault(group, []).append(parameter.main_grad)  # type: ignore[attr-defined]
        for group, grads in by_group.items():
            flat = torch.cat([grad.flatten() for grad in grads])
            torch.distributed.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))

    def clear(self) -> None:
        """Empty the buffers, after each optimizer step."""
        for trained in self._trained:
            trained.grad = None
        self._ddp.zero_grad_buffer()
        self._plain_losses, self._token_losses, self._num_tokens = 0, 0, None
        self._holds, self._finalized = False, False

    def adopt(self, optimizer: Optimizer) -> None:
        """Take an optimizer for the one that steps.

        Raises:
            RuntimeError: See :meth:`check_known`.
        """
        self.check_known(optimizer)
        self._held = [p for group in optimizer.param_groups for p in group["params"]]

    def check_known(self, optimizer: Optimizer) -> None:
        """Check that an optimizer trains only what is reduced.

        Raises:
            RuntimeError: If it holds a trainable parameter that was frozen, or not in the model, at set-up.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        unknown = sum(id(p) not in self._ids for p in held)
        if unknown:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds {unknown} trainable parameter(s) whose gradients are not reduced: "
                "they were unfrozen or made after set-up. Unfreeze before it (configure_model; in Fabric before "
                "setup), and set a group's learning rate to zero for as long as it should rest"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates."""
        self.is_accumulating = True
        try:
            with self._ddp.no_sync():
                yield
        finally:
            self.is_accumulating = False

    def close(self) -> None:
        """Disable the hooks on the parameters and free the buffers."""
        # A hook holds the DDP object, and lives as long as any graph through its parameter. Without an entry here it
        # does nothing; without the rest it holds nothing.
        self._ddp.param_to_bucket_group.clear()
        self._ddp.grad_accs.clear()
        for name in ("buffers", "bucket_groups", "expert_parallel_buffers", "expert_parallel_bucket_groups"):
            setattr(self._ddp, name, [])
        del self._ddp.module
        for watch in self._watches:
            watch.remove()
        for adapter in self._adapters:
            adapter.defer_sums(False)
        for router, per_token in self._routers:
            router.calculate_per_token_loss = per_token
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            trained.grad = None
            for name in ("main_grad", "grad_added_to_main_grad"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


def global_grad_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, each logical element counted once, equal on every rank.

    Sharded parameters are summed over the processes that hold the other shards; replicated ones count once. Experts
    have their own groups. One scalar is all-reduced for each group.

    Args:
        parameters: Parameters; those without a gradient are passed over.
        norm_type: Exponent p > 0; ``inf`` is the largest absolute value.

    Returns:
        A scalar.
    """
    largest = math.isinf(norm_type)
    # Groups are the same on all ranks; a missing gradient must not make the ranks disagree on what to all-reduce.
    powers: dict[ProcessGroup | None, list[Tensor]] = {}
    device = None
    for parameter in parameters:
        device = parameter.device if device is None else device
        grad = parameter.grad
        norm = torch.zeros((), device=device) if grad is None else torch.linalg.vector_norm(grad, norm_type)
        powers.setdefault(shard_group(parameter), []).append(norm if largest else norm**norm_type)
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    totals = [torch.zeros((), device=device)]
    for group, values in powers.items():
        total = torch.stack(values).max() if largest else torch.stack(values).sum()
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(total, op=op, group=group)
        totals.append(total)
    return torch.stack(totals).max() if largest else torch.stack(totals).sum() ** (1.0 / norm_type)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``.

    Args:
        parameters: Parameters with gradients.
        max_norm: The bound.
        norm_type: See :func:`global_grad_norm`.
        error_if_nonfinite: Whether to raise, on every rank, if the norm is not finite.

    Returns:
        The norm before.

    Raises:
        RuntimeError: If the norm is not finite and that is an error; gradients are left as they are.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the global gradient norm is {norm.item()}: nothing was clipped (error_if_nonfinite=True)")
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
