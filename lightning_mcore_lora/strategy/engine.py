"""What the strategy does, free of any trainer: processes, groups, streams, gradients, checkpoints.

The Trainer's and Fabric's faces are thin: they speak each framework's words to one :class:`Engine`.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from lightning_mcore_lora import cpu_backend
from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.checkpoint import content, place
from lightning_mcore_lora.checkpoint.process_state import Origin, ProcessState
from lightning_mcore_lora.checkpoint.tensors import Tensors, check_can_save, tensors_of
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
from lightning_mcore_lora.strategy import agreement, seeding
from lightning_mcore_lora.strategy.environment import cuda_defaults
from lightning_mcore_lora.strategy.gradients import GradientReducer, clip_grad_norm
from lightning_mcore_lora.strategy.loaders import EvenLoader, ResumableLoader, share_out
from lightning_mcore_lora.strategy.precision import Masters, mend_autocast
from lightning_mcore_lora.strategy.watch import PeerWatch, watch

_REDUCE_OPS = {
    "mean": torch.distributed.ReduceOp.AVG,
    "avg": torch.distributed.ReduceOp.AVG,
    "sum": torch.distributed.ReduceOp.SUM,
    "min": torch.distributed.ReduceOp.MIN,
    "max": torch.distributed.ReduceOp.MAX,
}

#: Optimizers that do not fit, and why.
REFUSED_OPTIMIZERS: dict[type, str] = {
    LBFGS: "it runs its closure several times a step, and gradients are reduced once",
    ZeroRedundancyOptimizer: "each rank would hold, and save, the state of some parameters only",
    MegatronOptimizer: (
        "it scales, reduces, clips and saves by itself (its distributed form too), where Lightning's loop does; the "
        "gradients that it wants are there, in main_grad"
    ),
}


class Engine:
    """State of one strategy in one process.

    Args:
        tensor_parallel_size: TP.
        sequence_parallel: SP; ``None`` is on when TP > 1.
        expert_parallel_size: EP.
        expert_tensor_parallel_size: ETP; ``None`` is TP.
        timeout: How long a collective may take before it fails.
        peer_timeout: How long another process may show no sign of life.
        save_base_weights: Whether checkpoints hold the frozen base too.
        async_save: Whether training goes on while a checkpoint is written.
    """

    def __init__(
        self,
        tensor_parallel_size: int,
        sequence_parallel: bool | None,
        expert_parallel_size: int,
        expert_tensor_parallel_size: int | None,
        timeout: timedelta,
        peer_timeout: timedelta,
        save_base_weights: bool = False,
        async_save: bool = False,
    ) -> None:
        self._save_base_weights = save_base_weights
        self.async_save = async_save
        self._save: content.Save | None = None
        self._sharded_streams: dict[str, Tensor] = {}
        self._tensor = tensor_parallel_size
        self._sequence_parallel = sequence_parallel
        self._expert = expert_parallel_size
        self._expert_tensor = expert_tensor_parallel_size
        self.timeout = timeout
        self.peer_timeout = peer_timeout
        self.parallel: ParallelContext | None = None
        self.reducer: GradientReducer | None = None
        self.masters = Masters()
        self.peers: PeerWatch | None = None
        self._transforms: list[Callable[[nn.Module], None]] = []
        self._to_continue: tuple[ProcessState, Origin] | None = None
        self._patched = False

    # -- processes ----------------------------------------------------------------------------------------------------

    def sizes(self, world_size: int) -> ParallelSizes:
        """The sizes for a world, checked.

        Raises:
            ParallelSizeError: If they do not fit.
        """
        given = (self._tensor, self._sequence_parallel, self._expert, self._expert_tensor)
        return ParallelSizes.completed(world_size, *given)

    def set_cuda_defaults(self) -> None:
        """Put environment variables in place, for this process and those it starts, while CUDA has not started."""
        if not torch.cuda.is_initialized():
            os.environ.update(cuda_defaults(os.environ, self._tensor))

    def start(self, world_size: int) -> None:
        """Build groups and streams. ``torch.distributed`` is initialised; may be called again.

        Raises:
            DisagreementError: If processes were started with different code or sizes.
        """
        if not self._patched:
            cpu_backend.apply()
            mend_autocast()
            self._patched = True
            if self.async_save:
                atexit.register(self._finish_at_exit)  # Fabric says nothing when it ends
        sizes = self.sizes(world_size)
        if self.peers is None:
            self.peers = watch(_get_default_store(), torch.distributed.get_rank(), world_size, self.peer_timeout)
            # Before any group is made: with different sizes the processes would wait for each other for ever.
            agreement.check_same("Code or parallel sizes", agreement.code_facts() | asdict(sizes))
        self.parallel = ParallelContext.create(sizes, self.timeout)
        seeding.seed_for_init()

    def stop(self) -> None:
        """Undo what :meth:`start` and :meth:`prepare` changed, but the groups, which the model goes on using."""
        try:
            self.finish_saving()
        finally:
            if self._patched:
                self._sharded_streams = seeding.get_random_state()["mcore"]
            self._leave()
            if self.reducer is not None:
                self.reducer.close()
                self.reducer = None
            if self._patched:
                cpu_backend.undo()
                self._patched = False

    def _finish_at_exit(self) -> None:
        if not hasattr(sys, "last_type"):  # nothing was raised
            self.finish_saving()

    def _leave(self) -> None:
        if self.peers is not None:
            self.peers.stop()
            self.peers = None

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one fails; what is being written will not be completed."""
        self._save = None
        if self.peers is not None:
            self.peers.report(error)

    # -- model and optimizers -----------------------------------------------------------------------------------------

    def register_transform(self, transform: Callable[[nn.Module], None]) -> None:
        """Have ``transform`` applied to the module before its optimizers are made; it must stand being called again."""
        if transform not in self._transforms:
            self._transforms.append(transform)

    def transform(self, module: nn.Module) -> None:
        """Apply the registered transforms."""
        for transform in self._transforms:
            transform(module)

    def prepare(self, module: nn.Module, settings: Mapping[str, Any]) -> None:
        """Make the module ready to train: everything that is frozen is frozen by now.

        Args:
            module: The module.
            settings: What else all processes must have in common.

        Raises:
            DisagreementError: If processes differ in their models, adapters or settings.
            NotImplementedError: If what is trainable could not be saved.
        """
        assert self.parallel is not None
        facts = {**agreement.module_facts(module), "adapters": [a.facts() for _, a in adapters(module)], **settings}
        agreement.check_same("Models, adapters or settings", facts)
        check_can_save(module, self._save_base_weights)
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        self.masters.stand_for(p for p in module.parameters() if p.requires_grad)
        self.reducer = GradientReducer(module, self.parallel, self.masters)
        seeding.seed_for_training(self.parallel)

    def adopt(self, optimizer: Optimizer) -> None:
        """Drop frozen parameters from an optimizer, and have it train float32 masters.

        Raises:
            ValueError: If nothing is left.
            NotImplementedError: If it is one that does not fit.
            DisagreementError: If processes differ in it.
        """
        for kind, reason in REFUSED_OPTIMIZERS.items():
            if isinstance(optimizer, kind):
                raise NotImplementedError(
                    f"{type(optimizer).__name__} is not supported by MCoreTP: {reason}. Use a plain torch optimizer"
                )
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        if not any(group["params"] for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} holds no trainable parameter: make it from the model's parameters() after "
                "the adapters are there (configure_optimizers; in Fabric after apply_lora)"
            )
        settings = [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        agreement.check_same("Optimizers", {"optimizer": type(optimizer).__name__, "its settings": settings})
        self.masters.give_to(optimizer)
        if self.reducer is not None:
            self.reducer.adopt(optimizer)

    def tensors(self, module: nn.Module) -> Tensors:
        """What there is to save: each trainable parameter or its float32 master, frozen factors of adapters, ..."""
        return tensors_of(module)

    # -- steps --------------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager:
        """Inside, backward only accumulates."""
        return contextlib.nullcontext() if self.reducer is None else self.reducer.no_sync()

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's step: afterwards the parameters follow their masters, and the buffers are empty."""
        assert self.reducer is not None
        self.reducer.check_known(optimizer)
        yield
        self.masters.copy_back()
        self.reducer.clear()
        self.finish_saving(wait=False)

    def reduced_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with the gradients reduced once it has run."""

        def closure_then_reduce() -> Any:
            result = closure()
            assert self.reducer is not None
            self.reducer.finalize()
            return result

        return closure_then_reduce

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0, strict: bool = False) -> Tensor:
        """Clip by the global norm; see :func:`lightning_mcore_lora.strategy.gradients.clip_grad_norm`."""
        return clip_grad_norm(parameters, max_norm, norm_type, strict)

    # -- collectives --------------------------------------------------------------------------------------------------

    def samples_group(self, group: Any) -> Any:
        """``group``, or the data-parallel group where none is given; Lightning gives the world where the user did not.

        Tensor-parallel peers hold the same values: over the world each would be counted once for every peer.
        """
        assert self.parallel is not None
        return self.parallel.dp_group if group in (None, torch.distributed.group.WORLD) else group

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor, by default over the data-parallel group: tensor-parallel peers hold the same value.

        Raises:
            ValueError: If the operation is unknown.
        """
        group = self.samples_group(group)
        if isinstance(reduce_op, str):
            if reduce_op.lower() not in _REDUCE_OPS:
                raise ValueError(f"reduce_op={reduce_op!r} must be one of {tuple(_REDUCE_OPS)} or a ReduceOp")
            reduce_op = _REDUCE_OPS[reduce_op.lower()]
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

    # -- data ---------------------------------------------------------------------------------------------------------

    def share_out(self, loader: DataLoader) -> None:
        """See :func:`lightning_mcore_lora.strategy.loaders.share_out`."""
        assert self.parallel is not None
        share_out(loader, self.parallel)

    def for_evaluation(self, loader: DataLoader, device: torch.device) -> Any:
        """A loader for a loop without a backward: only experts need every rank's company in each forward."""
        assert self.parallel is not None
        return EvenLoader(loader, device) if self.parallel.sizes.experts_span_replicas else loader

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | Path,
        rest: dict[str, Any],
        tensors: Tensors,
        optimizers: Sequence[Optimizer],
        loaders: Sequence[ResumableLoader],
        step: int | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        """Write a checkpoint directory; see :class:`lightning_mcore_lora.checkpoint.content.Save`."""
        assert self.parallel is not None
        check_can_save(tensors.module, self._save_base_weights)
        self.finish_saving()
        streams = seeding.get_random_state()
        if not self._patched:  # after the run, whose streams went with the backend
            streams["mcore"] = self._sharded_streams
        process = ProcessState(streams, [loader.epoch_start for loader in loaders])
        self._save = content.Save(
            path,
            tensors,
            rest,
            optimizers,
            self.parallel,
            process,
            step=step,
            everything=self._save_base_weights,
            left_out=left_out,
            # A job that SLURM is about to end, and to start again, has no later step.
            in_background=self.async_save and self._patched and not Path(path).name.startswith("hpc_ckpt_"),
        )

    def finish_saving(self, wait: bool = True) -> None:
        """Complete a checkpoint that is written in the background. A collective, if there is one."""
        if self._save is None:
            return
        self._save.advance(wait)
        if self._save.is_complete:
            self._save = None

    def load(
        self,
        path: str | Path,
        tensors: Tensors,
        optimizers: Sequence[Optimizer],
        strict: bool = True,
        goes_on: bool = False,
    ) -> content.Loaded:
        """Read a checkpoint directory; if it is to continue, :meth:`continue_streams` sets its random streams."""
        assert self.parallel is not None
        self.finish_saving()
        goes_on = goes_on or bool(optimizers)
        loaded = content.load(path, tensors, optimizers, self.parallel, strict, with_streams=goes_on)
        self._to_continue = None if loaded.process is None else (loaded.process, loaded.origin)
        return loaded

    def load_weights(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        """Set trainable parameters, their masters, and buffers."""
        buffers = dict(module.named_buffers(remove_duplicate=False))
        trained = {name: value for name, value in weights.items() if name not in buffers}
        self.masters.load(dict(module.named_parameters()), trained)
        with torch.no_grad():
            for name in weights.keys() & buffers.keys():
                buffers[name].copy_(weights[name])

    def continue_streams(self, loaders: Sequence[ResumableLoader]) -> bool:
        """Set the random streams of a loaded checkpoint, once; returns whether there was one to continue from."""
        if self._to_continue is None:
            return False
        (process, origin), self._to_continue = self._to_continue, None
        assert self.parallel is not None
        seeding.continue_from(process.random, origin, self.parallel)
        for loader, epoch_start in zip(loaders, process.epochs, strict=False):
            loader.epoch_start = epoch_start if origin.shared else None
        return True

    def remove(self, path: str | Path) -> None:
        """Delete a checkpoint, but not before the next one is complete."""
        assert self.parallel is not None
        if self._save is not None and not self._save.is_complete:
            self._save.remove_then(Path(path))
        elif self.parallel.global_rank == 0:
            place.remove(Path(path))
