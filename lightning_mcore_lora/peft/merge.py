"""A base model's directory with an adapter in its weights, file by file."""

from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from lightning_mcore_lora.adapters.merging import delta_weight, merged_weight
from lightning_mcore_lora.models.directories import new_directory
from lightning_mcore_lora.models.hf_config import read_hf_config
from lightning_mcore_lora.models.loading import copy_beside_weights, open_safetensors, safetensors_files
from lightning_mcore_lora.peft.adapter import Adapter, Update
from lightning_mcore_lora.peft.checkpoint import adapter_of_checkpoint, is_checkpoint
from lightning_mcore_lora.peft.names import Names, OnDisk
from lightning_mcore_lora.peft.reading import read


def merge_directory(base: str | Path, adapter: str | Path, out: str | Path) -> Path:
    """Write a Hugging Face model whose weights have an adapter in them.

    Computed in float32 and rounded once to the base's dtype. Weights are read and written one file of the base after
    the other: memory holds one, and the adapter.

    Args:
        base: Directory of the base model, with safetensors.
        adapter: A PEFT adapter, of PEFT or of :func:`~lightning_mcore_lora.save_peft_adapter` in either form; or a
            training checkpoint.
        out: Directory to make.

    Returns:
        The directory.

    Raises:
        FileExistsError: If ``out`` has something in it.
        ValueError: If the adapter is of another model; nothing is written then.
    """
    base, adapter = Path(base), Path(adapter)
    with new_directory(out) as partial:
        names = Names(read_hf_config(base))
        found = adapter_of_checkpoint(adapter, base) if is_checkpoint(adapter) else read(adapter, names)
        sources = safetensors_files(base)
        _check_places(found, names, sources)
        copy_beside_weights(base, partial)
        console = Console(stderr=True)
        for file in track(sources, "Merging", transient=True, console=console, disable=not console.is_terminal):
            with open_safetensors(file) as tensors:
                merged = {name: _merged(name, tensors.get_tensor(name), found, names) for name in tensors.keys()}  # noqa: SIM118
                save_file(merged, partial / file.name, tensors.metadata() or {"format": "pt"})
                del merged  # before the next file
    return Path(out)


def _check_places(adapter: Adapter, names: Names, sources: list[Path]) -> None:
    """Check, by the files' headers, that everything in the adapter has a weight of its shape to go to."""
    shapes: dict[str, tuple[int, ...]] = {}
    with ExitStack() as stack:
        for file in sources:
            tensors = stack.enter_context(open_safetensors(file))
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    reached = {names.on_disk.get(name, OnDisk(name)).parameter for name in shapes}
    lost = sorted({*adapter.updates, *adapter.modules} - reached)
    if lost:
        tied = " (it is tied to the embedding: untie the base first)" if lost == ["lm_head.weight"] else ""
        raise ValueError(f"the base has no weight for the adapter's {lost[:4]}{tied}")
    for name, shape in shapes.items():
        expected = _expected(name, adapter, names)
        if expected not in (None, shape):
            raise ValueError(f"{name} of the base is {shape}, the adapter is for {expected}: another model?")


def _expected(name: str, adapter: Adapter, names: Names) -> tuple[int, ...] | None:
    """The shape of a tensor on disk that the adapter would fit, if it has something for it."""
    where = names.on_disk.get(name, OnDisk(name))
    in_full = adapter.modules.get(where.parameter)
    if in_full is not None:
        return tuple(in_full.shape)
    update = adapter.updates.get(where.parameter)
    if update is None:
        return None
    experts, rows, columns = update.a.shape[:-2], update.b.shape[-2] // where.part[1], update.a.shape[-1]
    shape = (columns, rows) if where.transposed else (rows, columns)
    return shape if where.expert is not None else (*experts, *shape)


def _merged(name: str, weight: Tensor, adapter: Adapter, names: Names) -> Tensor:
    """One tensor of the base with what the adapter has for it."""
    where = names.on_disk.get(name, OnDisk(name))
    if where.parameter in adapter.modules:
        return adapter.modules[where.parameter].to(weight.dtype).contiguous()
    copy = adapter.copies.get(where.parameter)
    if copy is not None and not torch.equal(copy.to(weight.dtype), weight):
        raise ValueError(f"{name} was changed before the adapter was trained: save that base, and merge into it")
    if where.parameter not in adapter.updates:
        return weight
    update = adapter.updates[where.parameter]
    scale = update.scale(adapter.rslora)
    if update.a.dim() == 2 or where.expert is not None:
        return _one(weight, _part(update, where), scale)
    whole = [_one(w.T if where.transposed else w, _part(update, where, e), scale) for e, w in enumerate(weight)]
    return torch.stack([w.T if where.transposed else w for w in whole]).contiguous()


def _part(update: Update, where: OnDisk, expert: int | None = None) -> Update:
    """What of an update is for one matrix on disk."""
    e = where.expert if expert is None else expert
    if e is not None:
        magnitude = None if update.magnitude is None else update.magnitude[e]
        update = Update(update.a[e], update.b[e], update.alpha, magnitude)
    number, count = where.part
    magnitude = None if update.magnitude is None else update.magnitude.chunk(count)[number]
    return Update(update.a, update.b.chunk(count)[number], update.alpha, magnitude)


def _one(weight: Tensor, update: Update, scale: float) -> Tensor:
    return merged_weight(weight, delta_weight(update.a, update.b, scale), update.magnitude)
