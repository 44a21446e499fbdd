"""The command line: ``lightning-mcore-lora dequantize | doctor | estimate | export | merge | recommend``."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import auto_cli

from lightning_mcore_lora.memory.command import estimate, recommend
from lightning_mcore_lora.memory.doctor import doctor
from lightning_mcore_lora.models.dequantize import dequantize
from lightning_mcore_lora.peft.checkpoint import export_checkpoint
from lightning_mcore_lora.peft.merge import merge_directory

COMMANDS: dict[str, Any] = {
    "dequantize": dequantize,
    "doctor": doctor,
    "estimate": estimate,
    "export": export_checkpoint,
    "merge": merge_directory,
    "recommend": recommend,
}
#: Commands that look at the device; all others are the CPU's work, and a model would go where CUDA is.
_LOOK_AT_CUDA = ("doctor",)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: Its arguments; ``None`` takes those of the process.

    Raises:
        SystemExit: With what is wrong, in one line.
    """
    args = _with_values(sys.argv[1:] if args is None else args)
    if torch.cuda.is_available() and args[:1] not in ([name] for name in _LOOK_AT_CUDA):
        command = [sys.executable, "-m", "lightning_mcore_lora.cli", *args]
        os.execve(sys.executable, command, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    warnings.simplefilter("ignore")
    try:
        out = auto_cli(COMMANDS, args=args, as_positional=False, prog="lightning-mcore-lora")
    except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    if out is not None:
        print(f"Wrote {out}")


def _with_values(args: Sequence[str]) -> list[str]:
    """Arguments in which ``--json`` alone is ``--json true``, as jsonargparse wants it."""
    given = list(args)
    if "--json" in given and given[given.index("--json") + 1 :][:1] not in (["true"], ["false"]):
        given.insert(given.index("--json") + 1, "true")
    return given


if __name__ == "__main__":
    main()
