"""The strategy: one public class, for the Trainer and for Fabric."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.strategies import ParallelStrategy as FabricStrategy
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy

from lightning_mcore_lora.strategy.engine import Engine
from lightning_mcore_lora.strategy.fabric import FabricFace, NoSync
from lightning_mcore_lora.strategy.launchers import check_start_method
from lightning_mcore_lora.strategy.trainer import TrainerFace


def _by_user(name: str) -> Callable[..., Any]:
    """A member that the Trainer and Fabric call by one name in different words."""

    def call(self: "MCoreTP", *args: Any, **kwargs: Any) -> Any:
        return getattr(self._face, name)(self, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"What :class:`TrainerFace` and :class:`FabricFace` do at ``{name}``."
    return call


class MCoreTP(TrainerFace, FabricFace):  # type: ignore[misc]
    """Train Megatron-Core models with tensor, sequence, expert and data parallelism, from a Trainer or from Fabric.

    Build the model where Megatron-Core's groups exist: in ``LightningModule.configure_model``, or in Fabric after
    ``launch()``::

        def configure_model(self):
            if self.model is None:
                self.model = build_gpt_model(directory, self.trainer.strategy.parallel)

    ``training_step`` returns a mean loss, which is averaged over microbatches and data-parallel ranks; or
    ``{"loss": summed, "num_tokens": n}``, and each token of the optimizer step weighs the same. Fabric:
    ``fabric.backward(loss)`` or ``fabric.backward(summed, num_tokens=n)``.

    The same script runs on CPUs (gloo) and on CUDA devices (NCCL). Processes are launched by running the script once
    per device, by torchrun, or by SLURM.

    Args:
        tensor_parallel_size: Processes among which each dense layer is split (TP).
        sequence_parallel: Whether activations between are split along the sequence (SP). ``None`` is on when TP > 1.
        expert_parallel_size: Processes among which a layer's experts are split (EP).
        expert_tensor_parallel_size: Processes among which one expert is split (ETP). ``None`` is TP.
        timeout: How long a collective may take before it fails.
        peer_timeout: How long another process may show no sign of life before this one ends too.
        save_base_weights: Whether checkpoints hold the frozen base too; they are complete then, and as large as it.
        async_save: Whether training goes on while a checkpoint is written by another process. It is complete, and older
            ones are deleted, when a later step or the end of the run finds it written.
        start_method: ``"popen"`` runs the script once per device; ``"spawn"`` starts processes for one call.
        accelerator: Set by Lightning.
        parallel_devices: Set by Lightning.
        cluster_environment: Set by Lightning.
        checkpoint_io: Set by Lightning.
        precision_plugin: Set by the Trainer.
        precision: Set by Fabric.

    Raises:
        ParallelSizeError: At start, if the sizes do not fit the number of processes.
        DisagreementError: At start, if processes run different code or settings.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool | None = None,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        peer_timeout: timedelta = timedelta(minutes=5),
        save_base_weights: bool = False,
        async_save: bool = False,
        start_method: str = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        precision: FabricPrecision | None = None,
    ) -> None:
        check_start_method(start_method)
        shared = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
        }
        FabricStrategy.__init__(self, **shared, precision=precision)  # type: ignore[arg-type]
        ParallelStrategy.__init__(self, **shared, precision_plugin=precision_plugin)  # type: ignore[arg-type]
        self.start_method = start_method
        self.engine = Engine(
            tensor_parallel_size,
            sequence_parallel,
            expert_parallel_size,
            expert_tensor_parallel_size,
            timeout,
            peer_timeout,
            save_base_weights,
            async_save,
        )
        self._backward_sync_control = NoSync(self.engine)
        self._num_nodes = 1
        self._face: type[TrainerFace] | type[FabricFace] = TrainerFace

    # Either framework calls one of these first.

    def set_world_ranks(self) -> None:
        """Called by the Trainer."""
        self._face = TrainerFace
        self._tell_ranks()

    def _set_world_ranks(self) -> None:
        self._face = FabricFace
        self._tell_ranks()

    _configure_launcher = _by_user("_configure_launcher")
    setup_environment = _by_user("setup_environment")
    process_dataloader = _by_user("process_dataloader")
    tensor_init_context = _by_user("tensor_init_context")
    backward = _by_user("backward")
    optimizer_step = _by_user("optimizer_step")
    save_checkpoint = _by_user("save_checkpoint")
    load_checkpoint = _by_user("load_checkpoint")
