"""Parallel sizes, ranks and process groups: one validated object that everything else asks."""

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor
    from torch.distributed import ProcessGroup


class ParallelSizeError(ValueError):
    """A parallel size does not fit the world, the model or the data."""


def _require_divisible(name: str, value: int, by: str, size: int, fix: str) -> None:
    if value % size:
        raise ParallelSizeError(f"{name}={value} is not divisible by {by}={size}. {fix}")


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel dimensions; dense ranks run tensor-parallel first, then data-parallel.

    Args:
        world_size: Number of processes.
        tensor: Tensor-parallel size of dense layers (TP).
        sequence_parallel: Whether activations between TP regions are sharded along the sequence (SP).
        expert: Expert-parallel size (EP).
        expert_tensor: Tensor-parallel size inside experts (ETP).

    Raises:
        ParallelSizeError: If the sizes do not multiply to the world size.
    """

    world_size: int
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        named = {
            "world_size": self.world_size,
            "tensor_parallel_size": self.tensor,
            "expert_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
        }
        for name, size in named.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ParallelSizeError(f"{name}={size!r} must be a positive integer.")
        how = (
            "Choose devices * num_nodes as a multiple of it, or change {}; "
            f"this run has {self.world_size} process(es)."
        )
        _require_divisible(
            "world_size", self.world_size, "tensor_parallel_size", self.tensor, how.format("tensor_parallel_size")
        )
        _require_divisible(
            "world_size",
            self.world_size,
            "expert_parallel_size * expert_tensor_parallel_size",
            self.expert * self.expert_tensor,
            how.format("one of the two"),
        )
        if self.sequence_parallel and self.tensor == 1:
            raise ParallelSizeError(
                "sequence_parallel=True needs tensor_parallel_size > 1 (it is 1): raise it, or leave "
                "sequence_parallel=None, which follows tensor_parallel_size."
            )

    @classmethod
    def completed(
        cls,
        world_size: int | None,
        tensor: int,
        sequence_parallel: bool | None,
        expert: int,
        expert_tensor: int | None,
    ) -> "ParallelSizes":
        """Sizes with what is left out: as many processes as they need, SP where TP > 1, ETP equal to TP."""
        etp = tensor if expert_tensor is None else expert_tensor
        sequence = tensor > 1 if sequence_parallel is None else sequence_parallel
        return cls(max(tensor, expert * etp) if world_size is None else world_size, tensor, sequence, expert, etp)

    @property
    def data(self) -> int:
        """Data-parallel size of dense layers."""
        return self.world_size // self.tensor

    @property
    def experts_span_replicas(self) -> bool:
        """Whether a forward of a mixture may need the processes of other data-parallel replicas."""
        return self.expert > 1 or self.expert_tensor > self.tensor

    def check_model(self, config: "TransformerConfig") -> None:
        """Check that a model can be split in this way, before anything is built.

        Args:
            config: Megatron-Core's config of the model.

        Raises:
            ParallelSizeError: Naming the model's setting, the parallel size and what to do.
        """
        change = "Choose a tensor_parallel_size that divides it."
        tensor = ("tensor_parallel_size", self.tensor, change)
        _require_divisible("num_attention_heads", config.num_attention_heads, *tensor)
        _require_divisible(
            "num_query_groups (key-value heads)", config.num_query_groups or config.num_attention_heads, *tensor
        )
        if not config.num_moe_experts or config.moe_layer_freq != 1:
            _require_divisible("ffn_hidden_size", config.ffn_hidden_size, *tensor)
        if config.num_moe_experts:
            _require_divisible(
                "num_moe_experts",
                config.num_moe_experts,
                "expert_parallel_size",
                self.expert,
                "Choose an expert_parallel_size that divides it.",
            )
            if config.moe_shared_expert_intermediate_size:
                shared = config.moe_shared_expert_intermediate_size
                _require_divisible("moe_shared_expert_intermediate_size", shared, *tensor)
            _require_divisible(
                "moe_ffn_hidden_size",
                config.moe_ffn_hidden_size or config.ffn_hidden_size,
                "expert_tensor_parallel_size",
                self.expert_tensor,
                "Choose an expert_tensor_parallel_size that divides it.",
            )
            if config.add_bias_linear and self.expert_tensor > 1:
                raise ParallelSizeError(
                    f"The experts have biases, which Megatron-Core allows only at expert_tensor_parallel_size=1 (it is "
                    f"{self.expert_tensor}): set it to 1."
                )
            if self.tensor > 1 and not self.sequence_parallel:
                raise ParallelSizeError(
                    f"A mixture-of-experts model at tensor_parallel_size={self.tensor} needs sequence_parallel=True "
                    "(Megatron-Core trains it only so)."
                )
        elif self.expert > 1:
            raise ParallelSizeError(f"expert_parallel_size={self.expert}, but the model has no experts: leave it at 1.")

    def check_sequence(self, length: int) -> None:
        """Check the length of a batch's sequences.

        Args:
            length: Tokens per sequence, padding included.

        Raises:
            ParallelSizeError: If sequence parallelism cannot split it evenly.
        """
        if self.sequence_parallel:
            _require_divisible(
                "sequence length",
                length,
                "tensor_parallel_size",
                self.tensor,
                "With sequence_parallel=True pad each batch to a multiple of tensor_parallel_size.",
            )


class Experts(Enum):
    """How a parameter of an adapter of experts is held over the expert-parallel group; its mark ``experts``."""

    EACH = "each expert has its own: the first dimension is this rank's experts"
    ALL = "all experts have the same one"


def experts_are_apart() -> bool:
    """Whether experts have groups of their own to reduce over.

    Megatron-Core leaves the mark ``allreduce=True`` on experts' weights at EP = 1, where they need it too if ETP is not
    TP.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    expert_tensor = parallel_state.get_expert_tensor_parallel_world_size()
    return parallel_state.get_expert_model_parallel_world_size() > 1 or expert_tensor != tensor


def shard_group(parameter: "Tensor") -> "ProcessGroup | None":
    """The processes that hold the parts of a logical parameter, by its marks; ``None`` where each holds all of it."""
    is_sharded = getattr(parameter, "tensor_model_parallel", False)
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group() if is_sharded else None
    if getattr(parameter, "experts", None) is Experts.ALL:
        return parallel_state.get_expert_tensor_parallel_group() if is_sharded else None
    if is_sharded:
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_expert_model_parallel_group()


class ParallelContext:
    """This process's ranks and groups in Megatron-Core's global parallel state.

    Groups are made by :meth:`create` and destroyed by :meth:`destroy`; both may be called again.

    Args:
        sizes: The validated sizes.
    """

    def __init__(self, sizes: ParallelSizes) -> None:
        self.sizes = sizes

    @classmethod
    def create(cls, sizes: ParallelSizes, timeout: timedelta = timedelta(minutes=30)) -> "ParallelContext":
        """Build the groups, or take over existing ones of the same sizes. ``torch.distributed`` must be initialised.

        Groups of other sizes, left by an earlier run in this process, are destroyed first.

        Args:
            sizes: What to build.
            timeout: How long a collective may take before it fails.
        """
        context = cls(sizes)
        if parallel_state.model_parallel_is_initialized():
            if context._matches():
                return context
            context.destroy()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            create_gloo_process_groups=False,
        )
        return context

    @classmethod
    def current(cls) -> "ParallelContext":
        """The groups that exist, whoever made them.

        Raises:
            RuntimeError: If there are none.
        """
        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "there are no parallel groups: call this where the strategy has made them (configure_model; in Fabric "
                "after launch()), or make them with ParallelContext.create(ParallelSizes(world_size, tensor=...))"
            )
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        return cls(
            ParallelSizes(
                torch.distributed.get_world_size(),
                tensor,
                expert=parallel_state.get_expert_model_parallel_world_size(),
                expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
            )
        )

    def _matches(self) -> bool:
        return (
            parallel_state.get_tensor_model_parallel_world_size() == self.sizes.tensor
            and parallel_state.get_expert_model_parallel_world_size() == self.sizes.expert
            and parallel_state.get_expert_tensor_parallel_world_size() == self.sizes.expert_tensor
            and parallel_state.get_data_parallel_world_size() == self.sizes.data
        )

    def destroy(self) -> None:
        """Destroy the groups, if there are any. Megatron-Core only forgets them, and each keeps threads alive."""
        if not parallel_state.model_parallel_is_initialized():
            return
        groups = parallel_state._global_process_group_list[1:]  # the first stands for the default group
        parallel_state.destroy_model_parallel()
        for group in groups:
            torch.distributed.destroy_process_group(group)

    @property
    def global_rank(self) -> int:
        """Rank of this process in the world."""
        return torch.distributed.get_rank()

    @property
    def tp_group(self) -> "ProcessGroup":
        """Tensor-parallel group of dense layers."""
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def tp_rank(self) -> int:
        """Rank in :attr:`tp_group`."""
        return parallel_state.get_tensor_model_parallel_rank()

    @property
    def dp_group(self) -> "ProcessGroup":
        """Data-parallel group of dense layers: the processes that see different samples."""
        return parallel_state.get_data_parallel_group()

    @property
    def dp_rank(self) -> int:
        """Rank in :attr:`dp_group`."""
        return parallel_state.get_data_parallel_rank()

    @property
    def expert_model_group(self) -> "ProcessGroup":
        """Processes that together hold every expert once (EP x ETP)."""
        return parallel_state.get_expert_tensor_and_model_parallel_group()

    @property
    def ep_group(self) -> "ProcessGroup":
        """Expert-parallel group."""
        return parallel_state.get_expert_model_parallel_group()

    @property
    def ep_rank(self) -> int:
        """Rank in :attr:`ep_group`."""
        return parallel_state.get_expert_model_parallel_rank()

    @property
    def etp_rank(self) -> int:
        """Rank in the expert-tensor-parallel group."""
        return parallel_state.get_expert_tensor_parallel_rank()

    @property
    def expert_dp_rank(self) -> int:
        """Rank among the processes that hold the same part of the same experts."""
        return parallel_state.get_expert_data_parallel_rank()
