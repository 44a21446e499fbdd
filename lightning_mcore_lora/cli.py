"""The command line: ``lightning-mcore-lora dequantize | estimate | export | merge``."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import auto_cli

from lightning_mcore_lora.memory.command import estimate
from lightning_mcore_lora.models.dequantize import dequantize
from lightning_mcore_lora.peft.checkpoint import export_checkpoint
from lightning_mcore_lora.peft.merge import merge_directory

COMMANDS: dict[str, Any] = {
    "dequantize": dequantize,
    "estimate": estimate,
    "export": export_checkpoint,
    "merge": merge_directory,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: Its arguments; ``None`` takes those of the process.

    Raises:
        SystemExit: With what is wrong, in one line.
    """
    args = list(sys.argv[1:] if args is None else args)
    if torch.cuda.is_available():  # everything here is the CPU's work, and a model would go where CUDA is
        command = [sys.executable, "-m", "lightning_mcore_lora.cli", *args]
        os.execve(sys.executable, command, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    warnings.simplefilter("ignore")
    try:
        out = auto_cli(COMMANDS, args=args, as_positional=False, prog="lightning-mcore-lora")
    except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    if out is not None:
        print(f"Wrote {out}")


if __name__ == "__main__":
    main()
