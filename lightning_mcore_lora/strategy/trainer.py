"""The strategy for Lightning's Trainer."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.strategy import TBroadcast
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_mcore_lora.checkpoint import trainable
from lightning_mcore_lora.parallel import ParallelContext
from lightning_mcore_lora.strategy.engine import Engine
from lightning_mcore_lora.strategy.resumable import ResumableLoader

SUPPORTED_PRECISION = ("32-true", "bf16-mixed")


class MCoreTP(ParallelStrategy):
    """Train Megatron-Core models with tensor, sequence, expert and data parallelism from a Lightning Trainer.

    Build the model in ``LightningModule.configure_model``, where Megatron-Core's groups exist::

        def configure_model(self):
            if self.model is None:
                self.model = build_gpt_model(directory, self.trainer.strategy.parallel)

    ``training_step`` returns a mean loss, which is averaged over microbatches and data-parallel ranks; or
    ``{"loss": summed, "num_tokens": n}``, and each token of the optimizer step weighs the same.

    The same script runs on CPUs (gloo) and on CUDA devices (NCCL). Processes are launched by running the script once
    per device, or by torchrun.

    Args:
        tensor_parallel_size: Processes among which each dense layer is split (TP).
        sequence_parallel: Whether activations between are split along the sequence (SP). ``None`` is on when TP > 1.
        expert_parallel_size: Processes among which a layer's experts are split (EP).
        expert_tensor_parallel_size: Processes among which one expert is split (ETP). ``None`` is TP.
        timeout: How long a collective may take before it fails.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.

    Raises:
        ParallelSizeError: At start, if the sizes do not fit the number of processes.
    """

    strategy_name = "mcore_tp"

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool | None = None,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.engine = Engine(
            tensor_parallel_size, sequence_parallel, expert_parallel_size, expert_tensor_parallel_size, timeout
        )
        self._num_nodes = 1

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=f"Class: {cls.__name__}")

    # -- processes ----------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Tells the Trainer to give each data-parallel rank its own samples."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def parallel(self) -> ParallelContext:
        """The layout: sizes, ranks and groups.

        Raises:
            RuntimeError: Before the Trainer has set up its processes.
        """
        if self.engine.parallel is None:
            raise RuntimeError(
                f"{type(self).__name__} has no groups yet: they exist from LightningModule.configure_model on"
            )
        return self.engine.parallel

    @property
    def data_parallel_group(self) -> Any:
        """Group to give to torchmetrics: ``MeanMetric(process_group=strategy.data_parallel_group)``."""
        return self.parallel.dp_group

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.engine.sizes(self.num_nodes * self.num_processes)  # before any process starts
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment,
            _get_default_process_group_backend_for_device(self.root_device),
            timeout=self.engine.timeout,
            device_id=self.root_device if self.root_device.type == "cuda" else None,
        )
        self.engine.start(self.world_size)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the loggers which process this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def teardown(self) -> None:
        self.engine.stop()
        super().teardown()

    # -- set-up -------------------------------------------------------------------------------------------------------

    def register_transform(self, transform: Callable[[nn.Module], None]) -> None:
        """Have ``transform`` change the module after it is built and before its optimizers are."""
        self.engine.register_transform(transform)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._refuse(trainer)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.engine.transform(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if fitting:
            self.engine.prepare(self.lightning_module)
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self.engine.keep_trainable(optimizer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    def _refuse(self, trainer: "pl.Trainer") -> None:
        precision = str(self.precision_plugin.precision)
        if precision not in SUPPORTED_PRECISION:
            raise NotImplementedError(
                f"precision={precision!r} is not supported by {type(self).__name__} yet; "
                f"use one of {SUPPORTED_PRECISION}"
            )

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise NotImplementedError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; {type(self).__name__} reduces all "
                "gradients at one step: return one optimizer with parameter groups"
            )
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise NotImplementedError(
                f"LBFGS runs its closure several times a step, and {type(self).__name__} reduces gradients once: "
                "choose another optimizer"
            )

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.parallel.sizes.data, "rank": self.parallel.dp_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, DataLoader):
            return dataloader
        # Before the Trainer does it by global rank: tensor-parallel peers read the same samples and augment them alike.
        _auto_add_worker_init_fn(dataloader, self.parallel.dp_rank)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or hasattr(dataloader, "state_dict"):
            return dataloader
        return ResumableLoader(dataloader, lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _training_loaders(self) -> list[ResumableLoader]:
        assert self.lightning_module is not None
        combined = self.lightning_module.trainer.fit_loop._combined_loader
        return [] if combined is None else [dl for dl in combined.flattened if isinstance(dl, ResumableLoader)]

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if output is None or self.engine.reducer is None:
            return output
        assert self.lightning_module is not None
        if isinstance(output, Mapping):
            loss, tokens = output["loss"], output.get("num_tokens")
            return {**output, "loss": self.engine.reducer.scale_loss(loss, tokens, self._microbatches())}
        return self.engine.reducer.scale_loss(output, None, self._microbatches())

    def _microbatches(self) -> int:
        assert self.lightning_module is not None
        module = self.lightning_module
        return module.trainer.accumulate_grad_batches if module.automatic_optimization else 1

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self.engine.reducer is not None
        with self.engine.reducer.no_sync():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        reducer = self.engine.reducer
        assert reducer is not None

        def closure_then_reduce() -> Any:
            result = closure()
            reducer.finalize()
            return result

        result = super().optimizer_step(optimizer, closure_then_reduce, model, **kwargs)
        reducer.clear()
        return result

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.engine.clip_grad_norm(self.precision_plugin.main_params(optimizer), float(clip_val))

    # -- collectives --------------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.engine.reduce(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.engine.agree(bool(decision), self.root_device, all)

    @override
    def barrier(self, name: str | None = None) -> None:
        if torch.distributed.is_initialized():
            device = [self.root_device.index] if self.root_device.type == "cuda" else None
            torch.distributed.barrier(device_ids=device)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not torch.distributed.is_initialized():
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # adapters must be there before their weights

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return {name: parameter.detach() for name, parameter in trainable(self.lightning_module).items()}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} saves directories and takes no storage_options")
        assert self.lightning_module is not None
        optimizers, loaders = self._plain_optimizers(), self._training_loaders()
        self.engine.save(str(filepath), checkpoint, self.lightning_module, optimizers, loaders)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        resumes = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._plain_optimizers() if resumes else []  # an earlier fit may have left some
        return self.engine.load(str(checkpoint_path), self.lightning_module, optimizers, continues=resumes)

    def _plain_optimizers(self) -> list[Optimizer]:
        return [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # The checkpoint's names were compared with the trainable parameters; frozen weights are absent by design.
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    @override
    def on_train_start(self) -> None:
        self.engine.continue_streams(self._training_loaders())
