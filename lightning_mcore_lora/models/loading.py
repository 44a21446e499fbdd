"""Read Hugging Face safetensors into a Megatron-Core model, each rank only the slices it keeps."""

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from lightning_mcore_lora.models.families import Weight, read_hf_config
from lightning_mcore_lora.models.layouts import Shard, Slice
from lightning_mcore_lora.parallel import ParallelContext


def load_hf_weights(model: torch.nn.Module, directory: str | Path, parallel: ParallelContext) -> None:
    """Fill a model made by :func:`build_gpt_model` with the weights of a Hugging Face directory.

    Args:
        model: The Megatron-Core model; adapters it may already have are left as they are.
        directory: Folder with ``config.json`` and ``model.safetensors`` or ``model.safetensors.index.json``.
        parallel: The layout the model was built for.

    Raises:
        FileNotFoundError: If the folder has no safetensors file, or a file that the index names is missing.
        ValueError: If tensors are missing, left over, or of another shape than the model's, naming them.
    """
    directory = Path(directory)
    hf = read_hf_config(directory)
    shard = Shard(parallel.tp_rank, parallel.sizes.tensor, hf.transformer["num_query_groups"])
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        tensors = _open(directory, stack)
        unused = {name for name in tensors if not name.endswith(hf.family.ignored)}
        if hf.tied:
            unused.discard("lm_head.weight")
        for weight in _per_layer(hf.family.weights, hf.transformer["num_layers"]):
            name = next((name for name in weight.mcore if name in parameters), None)
            if name is None:
                if hf.tied and weight.mcore == ("output_layer.weight",):
                    continue
                raise ValueError(f"the model has none of {weight.mcore}: was it built from {directory}?")
            missing = [tensor for tensor in weight.hf if tensor not in tensors]
            if missing:
                raise ValueError(f"{directory} lacks the tensors {missing}, which {name} is made of")
            unused -= set(weight.hf)
            value = weight.layout([Slice(tensors[tensor].get_slice(tensor)) for tensor in weight.hf], shard)
            target = parameters[name]
            if value.shape != target.shape:
                raise ValueError(
                    f"{name} is {tuple(target.shape)} on this rank, but {weight.hf} of {directory} give "
                    f"{tuple(value.shape)}"
                )
            with torch.no_grad():
                target.copy_(value)
    if unused:
        raise ValueError(f"{directory} holds tensors that the model has no place for: {sorted(unused)[:10]}")


def _open(directory: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Tensor name to the open file that holds it."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = {}
    for file in names:
        path = directory / file
        if Path(file).name != file:
            raise ValueError(f"{index} points outside its folder: {file!r}")
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found")
        files[file] = stack.enter_context(safe_open(path, framework="pt"))
    return {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118


def _per_layer(weights: tuple[Weight, ...], layers: int) -> list[Weight]:
    expanded = []
    for weight in weights:
        if "{i}" not in weight.mcore[0]:
            expanded.append(weight)
            continue
        for i in range(layers):
            mcore = tuple(name.format(i=i) for name in weight.mcore)
            expanded.append(Weight(mcore, tuple(name.format(i=i) for name in weight.hf), weight.layout))
    return expanded
