"""Read Hugging Face safetensors into a Megatron-Core model, each rank only the slices it keeps."""

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lightning_mcore_lora.models.families import Weight
from lightning_mcore_lora.models.hf_config import read_hf_config
from lightning_mcore_lora.models.layouts import Shard, Slice, vocabulary
from lightning_mcore_lora.parallel import ParallelContext

#: What is one tensor in a tied model.
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")
#: Files beside the weights that make a model directory: config, tokenizer, template, licence.
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*", "NOTICE*")


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
        if hf.tied and "lm_head.weight" in tensors:
            _check_tied(directory, *(Slice(tensors[name].get_slice(name)) for name in _ENDS))
            unused.discard("lm_head.weight")
        for weight, expert, is_here in _numbered(hf.family.weights, hf.transformer, parallel):
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
            if weight.layout is vocabulary and sources[0].shape[0] != hf.vocab_size:
                raise ValueError(
                    f"{weight.hf[0]} of {directory} has {sources[0].shape[0]} rows, and its config says "
                    f"vocab_size={hf.vocab_size}: save the model again with one of the two mended"
                )
            target = parameters[name]
            shard = replace(shards[weight.is_expert], expert=expert, rows=target.shape[0])
            value = weight.layout.cut(sources, shard)
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


def safetensors_files(directory: Path) -> list[Path]:
    """The files with a model's weights, in the order of their names.

    Raises:
        FileNotFoundError: If there is none, or one that the index names is missing.
        ValueError: If the index names one elsewhere.
    """
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for file in names:
        if Path(file).name != file:
            raise ValueError(f"{index} points outside its folder: {file!r}")
        if not (directory / file).is_file():
            raise FileNotFoundError(f"{directory / file} not found")
    return [directory / file for file in names]


def _check_tied(directory: Path, embedding: Slice, output: Slice) -> None:
    """Check that an output layer that is tied to the embedding, and in the files too, is the same there."""
    rows = range(0, embedding.shape[0], 4096)
    if embedding.shape != output.shape or any(
        not torch.equal(embedding[i : i + 4096], output[i : i + 4096]) for i in rows
    ):
        raise ValueError(
            f"{directory} has tie_word_embeddings=true and an lm_head.weight that is not the embedding: set "
            "tie_word_embeddings to false in its config.json if the output layer is meant"
        )


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy what is in a model's directory beside its weights."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            shutil.copy2(file, target / file.name)


def open_safetensors(path: Path) -> safe_open:
    """Open a file.

    Raises:
        ValueError: If it is damaged, naming it.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def _open(directory: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Tensor name to the open file that holds it."""
    files = [stack.enter_context(open_safetensors(path)) for path in safetensors_files(directory)]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _numbered(
    weights: tuple[Weight, ...], fields: dict[str, Any], parallel: ParallelContext
) -> Iterator[tuple[Weight, int, bool]]:
    """Each weight for every layer and every expert, the expert's number, and whether this rank holds that expert.

    Every rank sees all experts, so that one that is missing fails on all of them.
    """
    experts = fields.get("num_moe_experts", 0)
    local = experts // parallel.sizes.expert
    for weight in weights:
        layers = range(fields["num_layers"]) if "{i}" in weight.mcore[0] else (0,)
        for i, e in itertools.product(layers, range(experts) if weight.is_expert else (0,)):
            numbers = {"i": i, "e": e, "local": e % local if weight.is_expert else None}
            mcore, hf = (tuple(name.format(**numbers) for name in names) for names in (weight.mcore, weight.hf))
            yield replace(weight, mcore=mcore, hf=hf), e, not weight.is_expert or e // local == parallel.ep_rank
