"""The facts that conflicts depend on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_mcore_lora.adapters.report import SiteReport
from lightning_mcore_lora.memory import allocator
from lightning_mcore_lora.memory.observed import adapted_sites, language_model
from lightning_mcore_lora.parallel import ParallelSizes

#: The first torch whose expandable segments NCCL can register as users' buffers.
FITS_NCCL_BUFFERS = (2, 11)
#: Tokens for which bytes are told where the batch is not known yet.
TOKENS = 8192

_FSDP = {"FullyShardedDataParallel", "FSDPModule", "MegatronFSDP"}


@dataclass(frozen=True)
class Situation:
    """What is known of a run before its first forward.

    Args:
        cuda: Whether it is to run on CUDA.
        environ: Environment variables.
        torch_version: Major and minor.
        capability: The device's compute capability; ``None`` if it is not known.
        running: The allocator of this process; ``None`` before CUDA has started.
        sizes: The layout.
        config: Megatron-Core's config of the model, or what is asked of it.
        ddp: Megatron-Core's config of data parallelism, in a loop of the user's own.
        fsdp: Whether parameters are sharded over replicas.
        sites: The adapters.
        tokens: Tokens of a microbatch, if that is known.
    """

    cuda: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    torch_version: tuple[int, int] = (2, 11)
    capability: tuple[int, int] | None = None
    running: allocator.Running | None = None
    sizes: ParallelSizes = field(default_factory=lambda: ParallelSizes(1))
    config: Any = None
    ddp: Any = None
    fsdp: bool = False
    sites: Sequence[SiteReport] = ()
    tokens: int | None = None

    @cached_property
    def requested(self) -> dict[str, str]:
        """The allocator's settings with which CUDA starts in this environment."""
        return allocator.requested(self.environ, self.torch_version)

    @property
    def expandable(self) -> bool:
        """Whether the allocator's segments are expandable: what it uses, or else what it will."""
        if self.running is not None:
            return self.running.expandable_segments
        return self.requested.get("expandable_segments") == "True"

    @property
    def nccl_buffers(self) -> str | None:
        """The setting by which NCCL registers users' buffers, or ``None``."""
        if self.of_ddp("nccl_ub"):
            return "nccl_ub=True"
        hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
        return f"{hook}={self.environ[hook]}" if self.environ.get(hook, "").lower() in _TRUE else None

    @property
    def buffers_refuse_expandable(self) -> bool:
        """Whether NCCL registers users' buffers, with a torch whose expandable segments it cannot register."""
        return self.nccl_buffers is not None and self.torch_version < FITS_NCCL_BUFFERS

    @property
    def refuses_expandable(self) -> bool:
        """Whether something that is asked for does not fit expandable segments."""
        return self.buffers_refuse_expandable or (self.cuda_graphs != "none" and self.registers_graphs)

    @property
    def registers_graphs(self) -> bool:
        """Whether NCCL registers what CUDA graphs capture."""
        return self.environ.get("NCCL_GRAPH_REGISTER") != "0"

    @property
    def cuda_graphs(self) -> str:
        """Who makes CUDA graphs of the model: ``"local"``, Megatron-Core's ``cuda_graph_impl``, or ``"none"``."""
        if self.of_config("external_cuda_graph"):  # the older names of both
            return "transformer_engine"
        return "local" if self.of_config("enable_cuda_graph") else self.of_config("cuda_graph_impl") or "none"

    def of_config(self, name: str) -> Any:
        """A field of the model's config; ``None`` if it is not there."""
        return getattr(self.config, name, None)

    def of_ddp(self, name: str) -> Any:
        """A field of data parallelism's config; ``None`` if it is not there."""
        return getattr(self.ddp, name, None)


_TRUE = ("1", "y", "yes", "t", "true", "on")


def observe(
    module: nn.Module | None, sizes: ParallelSizes, device: torch.device, precision: str, tokens: int | None
) -> Situation:
    """The situation of this process.

    Args:
        module: Holds the model, with its adapters; ``None`` if there is none.
        sizes: The layout.
        device: Where it runs.
        precision: Lightning's setting.
        tokens: Tokens of a microbatch, if that is known.
    """
    cuda = device.type == "cuda"
    modules = [] if module is None else list(module.modules())
    model = None if module is None else language_model(module)
    ddp = next((m.ddp_config for m in modules if hasattr(m, "ddp_config")), None)
    return Situation(
        cuda,
        os.environ,
        torch_version(),
        torch.cuda.get_device_capability(device) if cuda else None,
        allocator.running() if cuda else None,
        sizes,
        None if model is None else model.config,
        ddp,
        any(kind.__name__ in _FSDP for m in modules for kind in type(m).__mro__)
        or bool(getattr(ddp, "use_megatron_fsdp", False)),
        () if module is None else tuple(adapted_sites(module, sizes, precision)),
        tokens,
    )


def torch_version() -> tuple[int, int]:
    """Major and minor of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
