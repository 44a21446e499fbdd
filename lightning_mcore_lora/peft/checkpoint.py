"""Adapters from training checkpoints, in one process of their own."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_mcore_lora import cpu_backend
from lightning_mcore_lora.checkpoint import load_checkpoint
from lightning_mcore_lora.checkpoint.manifest import NAME, Manifest
from lightning_mcore_lora.models import build_gpt_model
from lightning_mcore_lora.models.hf_config import read_hf_config
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
from lightning_mcore_lora.peft.adapter import Adapter
from lightning_mcore_lora.peft.collect import adapter_of
from lightning_mcore_lora.peft.names import Names
from lightning_mcore_lora.peft.writing import write


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is a training checkpoint of this package."""
    return (directory / NAME).is_file()


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, base: str | Path | None = None, for_vllm: bool = False
) -> Path:
    """Write the adapters of a training checkpoint as a PEFT adapter.

    On the CPU of this process, whatever layout the checkpoint was saved at. The base's weights are not needed: memory
    for them is reserved and not touched.

    Args:
        checkpoint: The checkpoint directory.
        out: Folder for the PEFT adapter.
        base: The Hugging Face directory of the base model (its ``config.json`` is enough), where the checkpoint does
            not say which it is.
        for_vllm: As in :func:`~lightning_mcore_lora.save_peft_adapter`.

    Returns:
        The folder.

    Raises:
        CheckpointError: If it is incomplete, damaged, or of another model.
        ValueError: If it does not say which model it is of, or the format cannot hold what was trained.
    """
    source, base_name = _source(Path(checkpoint), base)
    adapter = adapter_of_checkpoint(checkpoint, source)
    write(adapter, Names(read_hf_config(source)), Path(out), base_name, for_vllm)
    return Path(out)


def adapter_of_checkpoint(checkpoint: str | Path, base: Any) -> Adapter:
    """What the adapters of a checkpoint add to a transformers model.

    Args:
        checkpoint: The checkpoint directory.
        base: Hugging Face directory of the base model, or the content of its ``config.json``.

    Raises:
        RuntimeError: If CUDA is visible: the model would take its memory.
    """
    if torch.cuda.is_available():
        raise RuntimeError("reading a checkpoint's adapters runs on the CPU: set CUDA_VISIBLE_DEVICES=''")
    names = Names(read_hf_config(base))
    with _one_process() as parallel, warnings.catch_warnings():
        # The base's weights are not there to be compared.
        warnings.filterwarnings("ignore", message=".*had other weights when this was saved")
        model = build_gpt_model(base, parallel, perform_initialization=False).requires_grad_(False)
        load_checkpoint(model, checkpoint)
        return adapter_of(model, names)


def _source(checkpoint: Path, base: str | Path | None) -> tuple[Any, str | None]:
    """The base's config, and its name."""
    if base is not None:
        return base, str(base)
    manifest = Manifest.read(checkpoint)
    settings = manifest.base.get("hf_config")
    if settings is None:
        raise ValueError(f"{checkpoint} does not say which Hugging Face model it is of: give base=DIR (--base DIR)")
    return settings, manifest.base["name"]


@contextmanager
def _one_process() -> Iterator[ParallelContext]:
    """A group of one, on the CPU."""
    with tempfile.TemporaryDirectory() as folder, cpu_backend.active():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            parallel = ParallelContext.create(ParallelSizes(1, 1))
            yield parallel
            parallel.destroy()
        finally:
            torch.distributed.destroy_process_group()
