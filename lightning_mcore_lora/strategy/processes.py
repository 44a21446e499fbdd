"""What the Trainer and Fabric ask of a strategy in the same words: processes, devices, groups, collectives."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.strategy import TBroadcast
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as all_gather_with_grad

from lightning_mcore_lora.parallel import ParallelContext
from lightning_mcore_lora.strategy.engine import Engine


class Processes:
    """One half of a strategy; the other is a face of Lightning's."""

    strategy_name = "mcore_tp"
    engine: Engine
    start_method: str
    cluster_environment: ClusterEnvironment | None
    accelerator: Any
    parallel_devices: list[torch.device] | None
    local_rank: int
    global_rank: int
    node_rank: int
    world_size: int
    _launcher: Any
    _num_nodes: int

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register as ``"mcore_tp"``, for the Trainer or for Fabric."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=f"Class: {cls.__name__}")

    @property
    def is_distributed(self) -> bool:
        """Tells the Trainer to give each data-parallel rank its own samples."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes."""
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
            RuntimeError: Before the processes are set up.
        """
        if self.engine.parallel is None:
            raise RuntimeError(
                f"{type(self).__name__} has no groups yet: they exist from LightningModule.configure_model on, and in "
                "Fabric after launch()"
            )
        return self.engine.parallel

    @property
    def data_parallel_group(self) -> Any:
        """Group to give to torchmetrics: ``MeanMetric(process_group=strategy.data_parallel_group)``."""
        return self.parallel.dp_group

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How samples are divided: by the data-parallel rank."""
        return {"num_replicas": self.parallel.sizes.data, "rank": self.parallel.dp_rank}

    def register_transform(self, transform: Callable[[nn.Module], None]) -> None:
        """Have ``transform`` change the module in set-up, before its optimizers are made."""
        self.engine.register_transform(transform)

    def _launch_with(self, launchers: dict[str, Callable[[Any], Any]]) -> None:
        self.engine.sizes(self.num_nodes * self.num_processes)  # before any process starts
        if self.root_device.type == "cuda":
            self.engine.set_cuda_defaults()
        self._launcher = launchers[self.start_method](self)

    def setup_environment(self) -> None:
        """Connect the processes and build their groups; may be called again."""
        self.accelerator.setup_device(self.root_device)
        reset_seed()
        self._tell_ranks()
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment,
            _get_default_process_group_backend_for_device(self.root_device),
            timeout=self.engine.timeout,
            device_id=self.root_device if self.root_device.type == "cuda" else None,
        )
        self.engine.start(self.world_size)

    def _tell_ranks(self) -> None:
        """Tell the cluster environment and the loggers which process this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    # -- collectives --------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor, by default to the mean over the data-parallel group; other values are returned as they are.

        ``torch.distributed.group.WORLD`` counts as no group: Lightning fills it in.

        Raises:
            ValueError: If the operation is unknown.
        """
        return self.engine.reduce(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor, by default from the data-parallel group: tensor-parallel peers hold the same value.

        Returns:
            ``[group size, *tensor.shape]``.
        """
        group = self.engine.samples_group(group)
        if sync_grads and torch.is_grad_enabled():
            return torch.stack(all_gather_with_grad(tensor, group=group))
        gathered = tensor.new_empty((group.size(), *tensor.shape))
        torch.distributed.all_gather(list(gathered.unbind()), tensor.contiguous(), group=group)
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision for every process: all must agree, or any suffices."""
        return self.engine.agree(bool(decision), self.root_device, all)

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        if torch.distributed.is_initialized():
            device = [self.root_device.index] if self.root_device.type == "cuda" else None
            torch.distributed.barrier(device_ids=device)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Give every process rank ``src``'s object."""
        if not torch.distributed.is_initialized():
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]
