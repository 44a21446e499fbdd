"""The command ``lightning-mcore-lora doctor``: what does not fit, before a launch."""

import dataclasses
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from rich import box
from rich.table import Table

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.memory import allocator
from lightning_mcore_lora.memory.command import print_table
from lightning_mcore_lora.memory.conflicts import Conflict, find_conflicts
from lightning_mcore_lora.memory.estimate import estimate_memory
from lightning_mcore_lora.memory.situation import TOKENS, Situation, torch_version
from lightning_mcore_lora.models.described import check_fields, describe, with_overrides
from lightning_mcore_lora.parallel import ParallelSizes

_PACKAGES = (
    "lightning-mcore-lora",
    "torch",
    "megatron-core",
    "transformer-engine",
    "lightning",
    "transformers",
    "peft",
)
_VARIABLES = (
    *allocator.VARIABLES,
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_GRAPH_REGISTER",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)


def doctor(
    model: Path | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int = 1,
    devices: int | None = None,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool | None = None,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    lora: LoRAConfig = LoRAConfig(),  # noqa: B008
    overrides: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    fsdp: bool = False,
    accelerator: str | None = None,
    capability: float | None = None,
) -> None:
    """Look for settings that do not fit each other, in this environment and for one run.

    Ends with status 1 if there is one with which the run would fail.

    Args:
        model: Hugging Face model directory; only its config.json is read.
        sequence_length: Tokens of a sequence.
        micro_batch_size: Sequences of a microbatch on one data-parallel replica.
        devices: Processes; as many as the sizes need if left out.
        tensor_parallel_size: TP.
        sequence_parallel: SP; on when TP > 1 if left out.
        expert_parallel_size: EP.
        expert_tensor_parallel_size: ETP; TP if left out.
        lora: The adapters.
        overrides: Fields of TransformerConfig, for example {"cpu_offloading": true}.
        ddp: Fields of Megatron-Core's DistributedDataParallelConfig, in a loop of your own.
        fsdp: Whether parameters are sharded over replicas.
        accelerator: cuda or cpu; what is here if left out.
        capability: The device's compute capability, for example 9.0; what is here if left out.
    """
    if accelerator not in (None, "cuda", "cpu"):
        raise ValueError(f"accelerator={accelerator!r} must be 'cuda' or 'cpu', or be left out")
    for name, number in (("sequence_length", sequence_length), ("micro_batch_size", micro_batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} must be a positive integer")
    if capability is not None and capability <= 0:
        raise ValueError(f"capability={capability} must be positive, for example 9.0")
    check_fields(overrides or {}, TransformerConfig)
    check_fields(ddp or {}, DistributedDataParallelConfig)
    here = torch.cuda.is_available()
    on_cuda = here if accelerator is None else accelerator == "cuda"
    if on_cuda and here:
        torch.cuda.init()  # so that what the allocator uses can be read
    sizes = ParallelSizes.completed(
        devices, tensor_parallel_size, sequence_parallel, expert_parallel_size, expert_tensor_parallel_size
    )
    fields = with_overrides({} if model is None else describe(model).fields, overrides or {})
    situation = Situation(
        on_cuda,
        os.environ,
        torch_version(),
        _capability(capability, on_cuda and here),
        allocator.running() if on_cuda and here else None,
        sizes,
        SimpleNamespace(**fields),
        None if ddp is None else SimpleNamespace(**ddp),
        fsdp,
    )
    found = find_conflicts(situation)
    if model is not None and not any(conflict.row.severity == "error" for conflict in found):
        estimate = estimate_memory(
            model,
            sizes,
            sequence_length=sequence_length or TOKENS,
            micro_batch_size=micro_batch_size,
            lora=lora,
            accelerator="cuda" if on_cuda else "cpu",
            **(overrides or {}),
        )
        tokens = micro_batch_size * sequence_length if sequence_length else None
        found = find_conflicts(dataclasses.replace(situation, sites=estimate.sites, tokens=tokens))
    print_table(_here(situation.capability))
    print_table(_table(found, situation))
    if on_cuda and situation.capability is None:
        print("Not looked at, for the device is not known: CUDA_DEVICE_MAX_CONNECTIONS (--capability, for example 9.0)")
    if model is None:
        print("Not looked at, for the model is not known: adapters, batch (--model)")
    if any(conflict.row.severity == "error" for conflict in found):
        raise SystemExit(1)


def _capability(given: float | None, here: bool) -> tuple[int, int] | None:
    if given is not None:
        major, _, minor = f"{given:.1f}".partition(".")
        return int(major), int(minor)
    return torch.cuda.get_device_capability() if here else None


def _here(capability: tuple[int, int] | None) -> Table:
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    table.add_row("python", platform.python_version())
    for package in _PACKAGES:
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "not installed")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none here"
    table.add_row("CUDA device", device + (f", capability {'.'.join(map(str, capability))}" if capability else ""))
    for name in _VARIABLES:
        table.add_row(name, repr(os.environ[name]) if name in os.environ else "unset")
    return table


def _table(found: list[Conflict], situation: Situation) -> Table | str:
    if not found:
        where = (
            "CUDA"
            if situation.cuda
            else "the CPU (for a CUDA device that is elsewhere: --accelerator cuda --capability 9.0)"
        )
        sizes = situation.sizes
        return f"\nNothing found that does not fit, for TP={sizes.tensor}, EP={sizes.expert} on {where}."
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("severity", "what", "confirm", "fix"):
        table.add_column(name, overflow="fold")
    for row, detail in found:
        table.add_row(row.severity, f"{row.name}: {detail}. {row.cause}", row.confirm, row.fix)
    return table
