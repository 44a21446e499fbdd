"""The commands ``lightning-mcore-lora estimate`` and ``recommend``."""

import json as json_format
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.memory.estimate import MemoryEstimate, estimate_memory
from lightning_mcore_lora.memory.plots import check_plot, plot_estimate
from lightning_mcore_lora.memory.recommend import Recommendation
from lightning_mcore_lora.memory.recommend import recommend as find_recommendation
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
    plot: Path | None = None,
) -> Path | None:
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
        plot: PNG, HTML, SVG or PDF file for the components as bars.
    """
    if plot is not None:
        check_plot(plot)
    found = estimate_memory(
        model,
        ParallelSizes.completed(
            devices, tensor_parallel_size, sequence_parallel, expert_parallel_size, expert_tensor_parallel_size
        ),
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
    _print(found, json)
    if plot is not None:
        plot_estimate(plot, found)
    return None if json else plot


def recommend(
    model: Path,
    sequence_length: int,
    budget_gib: float,
    devices: int,
    micro_batch_size: int = 1,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
    accelerator: str = "cuda",
    expert_imbalance: float = 1.0,
    lora: LoRAConfig = LoRAConfig(),  # noqa: B008
    overrides: dict[str, Any] | None = None,
    json: bool = False,
) -> None:
    """Search layouts and settings for the fastest that fits.

    Args:
        model: Hugging Face model directory; only its config.json is read.
        sequence_length: Tokens of a sequence.
        budget_gib: GiB that a rank may take: the device's, less a tenth for what is not counted.
        devices: Processes.
        micro_batch_size: Sequences of a microbatch on one data-parallel replica, where the search begins.
        precision: Lightning's setting.
        optimizer: Name of a torch optimizer.
        accelerator: cuda or cpu.
        expert_imbalance: Tokens that the busiest rank's experts get, over the mean.
        lora: The adapters.
        overrides: Fields of TransformerConfig.
        json: Print plain data, bytes throughout, in place of a table.
    """
    with Console(stderr=True).status("Estimating layouts"):
        found = find_recommendation(
            model,
            budget_gib,
            devices,
            sequence_length=sequence_length,
            micro_batch_size=micro_batch_size,
            precision=precision,
            optimizer=optimizer,
            accelerator=accelerator,
            expert_imbalance=expert_imbalance,
            lora=lora,
            **(overrides or {}),
        )
    _print(found, json)


def _print(found: MemoryEstimate | Recommendation, json: bool) -> None:
    if json:
        print(json_format.dumps(found.to_dict(), indent=2))
    else:
        print_table(found)


def print_table(found: Any) -> None:
    """Print what rich can, as wide as the terminal; into a file 120 columns wide."""
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=120)).print(found)
