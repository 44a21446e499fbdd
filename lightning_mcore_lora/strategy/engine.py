"""What the strategy does, free of any trainer: processes, groups, streams, gradients, checkpoints.

The Trainer's strategy (and Fabric's) is a thin face over one :class:`Engine`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mcore_lora import cpu_backend
from lightning_mcore_lora.checkpoint import load_checkpoint, save_checkpoint, trainable
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
from lightning_mcore_lora.strategy import seeding
from lightning_mcore_lora.strategy.gradients import GradientReducer, clip_grad_norm
from lightning_mcore_lora.strategy.resumable import ResumableLoader

_REDUCE_OPS = ("mean", "avg", "sum")


class Engine:
    """State of one strategy in one process.

    Args:
        tensor_parallel_size: TP.
        sequence_parallel: SP; ``None`` is on when TP > 1.
        expert_parallel_size: EP.
        expert_tensor_parallel_size: ETP; ``None`` is TP.
        timeout: How long a collective may take before it fails.
    """

    def __init__(
        self,
        tensor_parallel_size: int,
        sequence_parallel: bool | None,
        expert_parallel_size: int,
        expert_tensor_parallel_size: int | None,
        timeout: timedelta,
    ) -> None:
        self._tensor = tensor_parallel_size
        self._sequence_parallel = sequence_parallel
        self._expert = expert_parallel_size
        self._expert_tensor = expert_tensor_parallel_size
        self.timeout = timeout
        self.parallel: ParallelContext | None = None
        self.reducer: GradientReducer | None = None
        self._transforms: list[Callable[[nn.Module], None]] = []
        self._random_state: dict[str, Any] | None = None
        self._patched = False

    def sizes(self, world_size: int) -> ParallelSizes:
        """The sizes for a world, checked.

        Raises:
            ParallelSizeError: If they do not fit.
        """
        sequence = self._tensor > 1 if self._sequence_parallel is None else self._sequence_parallel
        expert_tensor = self._tensor if self._expert_tensor is None else self._expert_tensor
        return ParallelSizes(world_size, self._tensor, sequence, self._expert, expert_tensor)

    def start(self, world_size: int) -> None:
        """Build groups and streams. ``torch.distributed`` is initialised; may be called again."""
        if not self._patched:
            cpu_backend.apply()
            self._patched = True
        self.parallel = ParallelContext.create(self.sizes(world_size), self.timeout)
        seeding.seed_for_init()

    def stop(self) -> None:
        """Undo what :meth:`start` and :meth:`prepare` changed, but the groups, which the model goes on using."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        if self._patched:
            cpu_backend.undo()
            self._patched = False

    def register_transform(self, transform: Callable[[nn.Module], None]) -> None:
        """Have ``transform`` applied to the module before its optimizers are made; it must stand being called again."""
        if transform not in self._transforms:
            self._transforms.append(transform)

    def transform(self, module: nn.Module) -> None:
        """Apply the registered transforms."""
        for transform in self._transforms:
            transform(module)

    def prepare(self, module: nn.Module) -> None:
        """Make the module ready to train: everything that is frozen is frozen by now."""
        assert self.parallel is not None
        self._refuse_experts(module)
        if self.reducer is not None:
            self.reducer.close()
        self.reducer = GradientReducer(module, self.parallel)
        seeding.seed_for_training(self.parallel)

    def keep_trainable(self, optimizer: Optimizer) -> None:
        """Drop frozen parameters from an optimizer.

        Raises:
            ValueError: If nothing is left.
        """
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        if not any(group["params"] for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} holds no trainable parameter: give it self.parameters() in "
                "configure_optimizers, which sees the adapters"
            )

    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Tensor:
        """Clip by the global norm; see :func:`lightning_mcore_lora.strategy.gradients.clip_grad_norm`."""
        assert self.parallel is not None
        return clip_grad_norm(parameters, max_norm, self.parallel)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor, by default over the data-parallel group: tensor-parallel peers hold the same value.

        Raises:
            ValueError: If the operation is unknown.
        """
        assert self.parallel is not None
        group = self.parallel.dp_group if group is None else group
        if isinstance(reduce_op, str):
            if reduce_op.lower() not in _REDUCE_OPS:
                raise ValueError(f"reduce_op={reduce_op!r} must be one of {_REDUCE_OPS} or a ReduceOp")
            mean, op = reduce_op.lower() != "sum", torch.distributed.ReduceOp.SUM
        else:
            mean = reduce_op in (None, torch.distributed.ReduceOp.AVG)
            op = torch.distributed.ReduceOp.SUM if mean else reduce_op
        result = tensor.clone()
        if mean and not result.is_floating_point():
            result = result.float()
        torch.distributed.all_reduce(result, op=op, group=group)
        return result / group.size() if mean else result

    def agree(self, decision: bool, device: torch.device, all_ranks: bool) -> bool:
        """One decision over the world: all must agree, or any suffices."""
        flag = torch.tensor(int(decision), device=device)
        op = torch.distributed.ReduceOp.MIN if all_ranks else torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(flag, op=op)
        return bool(flag)

    def save(
        self,
        path: str | Path,
        checkpoint: dict[str, Any],
        module: nn.Module,
        optimizers: list[Optimizer],
        loaders: Sequence[ResumableLoader],
    ) -> None:
        """Write a checkpoint directory; see :func:`lightning_mcore_lora.checkpoint.save_checkpoint`."""
        assert self.parallel is not None
        state = {"now": seeding.get_random_state(), "epochs": [loader.epoch_start for loader in loaders]}
        save_checkpoint(path, checkpoint, module, optimizers, self.parallel, state)

    def load(self, path: str | Path, module: nn.Module, optimizers: list[Optimizer], continues: bool) -> dict[str, Any]:
        """Read a checkpoint directory; if the run ``continues``, :meth:`continue_streams` sets its random streams."""
        assert self.parallel is not None
        checkpoint = load_checkpoint(path, module, optimizers, self.parallel)
        random_state = checkpoint.pop("random_state")
        self._random_state = random_state if continues else None
        return checkpoint

    def continue_streams(self, loaders: Sequence[ResumableLoader]) -> None:
        """Set the random streams of a loaded checkpoint, once."""
        if self._random_state is None:
            return
        seeding.set_random_state(self._random_state["now"])
        for loader, epoch_start in zip(loaders, self._random_state["epochs"], strict=False):
            loader.epoch_start = epoch_start
        self._random_state = None

    @staticmethod
    def _refuse_experts(module: nn.Module) -> None:
        experts = [name for name, parameter in trainable(module).items() if not getattr(parameter, "allreduce", True)]
        if experts:
            raise NotImplementedError(
                f"training expert parameters at expert parallelism is not supported yet: freeze {experts[:3]} ..."
            )
