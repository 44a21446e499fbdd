"""Read Hugging Face safetensors into a Megatron-Core model, each rank only the slices it keeps."""

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    groups = hf.transformer["num_query_groups"]
    shards = {
        False: Shard(parallel.tp_rank, parallel.sizes.tensor, groups),
        True: Shard(parallel.etp_rank, parallel.sizes.expert_tensor, groups),
    }
    parameters = dict(model.named_parameters())
    unfilled = {name for name in parameters if ".lora." not in name}
    with ExitStack() as stack:
        tensors = _open(directory, stack)
        unused = {name for name in tensors if not name.endswith(hf.family.ignored)}
        if hf.tied:
            unused.discard("lm_head.weight")
        for weight, is_here in _numbered(hf.family.weights, hf.transformer, parallel):
            name = next((name for name in weight.mcore if name in parameters), None)
            if name is None:  # a layer is dense or a mixture, and a tied model has no output layer
                continue
            missing = [tensor for tensor in weight.hf if tensor not in tensors]
            if missing:
                raise ValueError(f"{directory} lacks the tensors {missing}, which {name} is made of")
            unused -= set(weight.hf)
            if not is_here:
                continue
            sources = [Slice(tensors[tensor].get_slice(tensor)) for tensor in weight.hf]
            value = weight.layout(sources, shards[weight.is_expert])
            target = parameters[name]
            if value.shape != target.shape:
                raise ValueError(
                    f"{name} is {tuple(target.shape)} on this rank, but {weight.hf} of {directory} give "
                    f"{tuple(value.shape)}"
                )
            with torch.no_grad():
                target.copy_(value)
            unfilled.discard(name)
    if unused:
        raise ValueError(f"{directory} holds tensors that the model has no place for: {sorted(unused)[:10]}")
    if unfilled:
        raise ValueError(f"{directory} says nothing of {sorted(unfilled)[:10]}: was the model built from it?")


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


def _numbered(
    weights: tuple[Weight, ...], fields: dict[str, Any], parallel: ParallelContext
) -> Iterator[tuple[Weight, bool]]:
    """Each weight for every layer and every expert, and whether this rank holds that expert.

    Every rank sees all experts, so that one that is missing fails on all of them.
    """
    experts = fields.get("num_moe_experts", 0)
    local = experts // parallel.sizes.expert
    for weight in weights:
        layers = range(fields["num_layers"]) if "{i}" in weight.mcore[0] else (0,)
        for i, e in itertools.product(layers, range(experts) if weight.is_expert else (0,)):
            numbers = {"i": i, "e": e, "local": e % local if weight.is_expert else None}
            mcore, hf = (tuple(name.format(**numbers) for name in names) for names in (weight.mcore, weight.hf))
            yield replace(weight, mcore=mcore, hf=hf), not weight.is_expert or e // local == parallel.ep_rank
