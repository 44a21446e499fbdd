"""The command ``lightning-mcore-lora estimate``."""

import json as json_format
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.memory.estimate import estimate_memory
from lightning_mcore_lora.parallel import ParallelSizes


def estimate(
    model: Path,
    sequence_length: int,
    micro_batch_size: int = 1,
    devices: int | None = None,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool | None = None,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
    accelerator: str = "cuda",
    attention: str | None = None,
    expert_imbalance: float = 1.0,
    lora: LoRAConfig = LoRAConfig(),  # noqa: B008
    overrides: dict[str, Any] | None = None,
    json: bool = False,
) -> None:
    """Estimate the memory of the most loaded rank before a launch.

    Args:
        model: Hugging Face model directory; only its config.json is read.
        sequence_length: Tokens of a sequence.
        micro_batch_size: Sequences of a microbatch on one data-parallel replica.
        devices: Processes; as many as the sizes need if left out.
        tensor_parallel_size: TP.
        sequence_parallel: SP; on when TP > 1 if left out.
        expert_parallel_size: EP.
        expert_tensor_parallel_size: ETP; TP if left out.
        precision: Lightning's setting.
        optimizer: Name of a torch optimizer.
        accelerator: cuda or cpu.
        attention: flash or unfused; what the layers use if left out.
        expert_imbalance: Tokens that the busiest rank's experts get, over the mean.
        lora: The adapters.
        overrides: Fields of TransformerConfig, for example {"recompute_granularity": "full"}.
        json: Print plain data, bytes throughout, in place of a table.
    """
    expert_tensor = tensor_parallel_size if expert_tensor_parallel_size is None else expert_tensor_parallel_size
    sizes = ParallelSizes(
        max(tensor_parallel_size, expert_parallel_size * expert_tensor) if devices is None else devices,
        tensor_parallel_size,
        tensor_parallel_size > 1 if sequence_parallel is None else sequence_parallel,
        expert_parallel_size,
        expert_tensor,
    )
    found = estimate_memory(
        model,
        sizes,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        precision=precision,
        optimizer=optimizer,
        lora=lora,
        accelerator=accelerator,
        attention=attention,
        expert_imbalance=expert_imbalance,
        **(overrides or {}),
    )
    if json:
        print(json_format.dumps(found.to_dict(), indent=2))
        return
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=120)).print(found)
