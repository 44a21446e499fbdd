"""Hugging Face PEFT's files from an adapter."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_mcore_lora.peft.adapter import Adapter, Update, alike
from lightning_mcore_lora.peft.files import CONFIG, EMBEDDING, HEAD, PREFIX, TENSORS, UNTIE
from lightning_mcore_lora.peft.names import Names, module_of
from lightning_mcore_lora.peft.vllm import check_for_vllm


def write(adapter: Adapter, names: Names, directory: Path, base_name: str | None, for_vllm: bool) -> None:
    """Write an adapter.

    Args:
        adapter: The adapter.
        names: Names of its model.
        directory: Folder to write to; files of the same names are replaced.
        base_name: Name or path of the base model.
        for_vllm: Whether to write experts under their own names, one rank and one alpha everywhere, as vLLM reads them.

    Raises:
        ValueError: If PEFT (or vLLM) cannot hold it, with the way out.
    """
    if for_vllm:
        check_for_vllm(adapter, names)
        adapter = Adapter(alike(adapter.updates, adapter.rslora), adapter.rslora)
    parts = [name for name in adapter.modules if not name.endswith((".weight", ".bias"))]
    if parts:
        raise ValueError(
            f"PEFT cannot hold {parts[0]} in full, a part of a larger module: merge the training checkpoint, with "
            "`lightning-mcore-lora merge --adapter CHECKPOINT`"
        )
    if names.hf.tied and HEAD in adapter.updates:
        raise ValueError(
            "PEFT does not tie an output layer with an adapter to the embedding: leave 'output_layer' out of "
            f"target_modules, or {UNTIE}"
        )
    by_parameter = {n: u for n, u in adapter.updates.items() if names.by_parameter[n].by_parameter}
    if by_parameter and adapter.dora:
        raise ValueError(
            f"PEFT cannot hold DoRA of {sorted(by_parameter)[:2]}, which it reaches as parameters: merge the training "
            "checkpoint, with `lightning-mcore-lora merge --adapter CHECKPOINT`, or train without dora"
        )
    if by_parameter:  # PEFT warns of patterns for parameters: they get the one rank and alpha that need none
        by_parameter = alike(by_parameter, adapter.rslora)
    updates = adapter.updates | by_parameter
    config, tensors = _config(adapter, updates, names, base_name), dict(_tensors(updates, names))
    one_by_one = dict(_one_by_one(updates, names)) if for_vllm else {}
    if one_by_one:
        tensors = {key: value for key, value in tensors.items() if ".experts." not in key} | one_by_one
        config["target_parameters"] = None
    if for_vllm:
        config["target_modules"] = sorted({key.split(".")[-3] for key in tensors} - {"base_layer"})
    tensors |= {PREFIX + name: value for name, value in adapter.modules.items()}
    if _is_tied(adapter, names):  # PEFT wants both
        tensors[f"{PREFIX}{HEAD}"] = adapter.modules[EMBEDDING]
    directory.mkdir(parents=True, exist_ok=True)
    # safetensors takes no tensors that share memory, as an A of several linears does.
    tensors = {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    save_file(tensors, directory / f".{TENSORS}", {"format": "pt"})
    (directory / f".{CONFIG}").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in (TENSORS, CONFIG):
        os.replace(directory / f".{name}", directory / name)


def _config(adapter: Adapter, updates: dict[str, Update], names: Names, base_name: str | None) -> dict[str, Any]:
    modules = {module_of(n): u for n, u in updates.items() if not names.by_parameter[n].by_parameter}
    parameters = {n: u for n, u in updates.items() if names.by_parameter[n].by_parameter}
    facts = Counter((u.rank, u.alpha) for u in (parameters or modules).values())
    rank, alpha = facts.most_common(1)[0][0]
    linears = [module_of(p) for p, t in names.by_parameter.items() if not t.by_parameter]
    leaves = sorted({_leaf(module) for module in modules})
    left_out = [module for module in linears if _leaf(module) in leaves and module not in modules]
    saved = sorted({"embed_tokens" if name == EMBEDDING else module_of(name) for name in adapter.modules})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        # Parameters cannot have dropout in PEFT; it matters in training only.
        "lora_dropout": 0.0 if parameters else adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": leaves or None,
        "exclude_modules": left_out or None,
        "target_parameters": _ends(parameters, list(names.by_parameter)) or None,
        "rank_pattern": _pattern({m: u.rank for m, u in modules.items()}, rank),
        "alpha_pattern": _pattern({m: _number(u.alpha) for m, u in modules.items()}, _number(alpha)),
        "modules_to_save": saved or None,
        "ensure_weight_tying": _is_tied(adapter, names),
    }


def _is_tied(adapter: Adapter, names: Names) -> bool:
    """Whether an embedding was trained that is the output layer too."""
    return names.hf.tied and EMBEDDING in adapter.modules


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _pattern(values: dict[str, Any], default: Any) -> dict[str, Any]:
    """What differs from the default: by last names where those have one value, else by whole ones."""
    by_leaf = defaultdict(set)
    for module, value in values.items():
        by_leaf[_leaf(module)].add(value)
    found = {}
    for module, value in values.items():
        if value != default:
            found[_leaf(module) if len(by_leaf[_leaf(module)]) == 1 else module] = value
    return found


def _ends(wanted: dict[str, Any], known: list[str]) -> list[str]:
    """Ends of names that name these parameters in every layer and no other, or else whole names."""
    found = set()
    for name in wanted:
        end = re.sub(r".*\.layers\.\d+\.", "", name)
        fits = all(other in wanted for other in known if other.endswith(f".{end}"))
        found.add(end if fits else name)
    return sorted(found)


def _tensors(updates: dict[str, Update], names: Names) -> Iterator[tuple[str, Tensor]]:
    in_module = defaultdict(list)
    for name, update in updates.items():
        if update.a.dim() == 3:
            in_module[module_of(name)].append(name)
    for name, update in updates.items():
        module = module_of(name)
        # PEFT wraps a module once for each of its parameters, the last outermost.
        depth = len(in_module[module]) - 1 - in_module[module].index(name) if name in in_module[module] else 0
        yield from _keys(f"{module}{'.base_layer' * depth}", _flat(update))


def _flat(update: Update) -> Update:
    if update.a.dim() == 2:
        return update
    b = update.b.permute(1, 2, 0).flatten(1)  # experts vary fastest
    return Update(update.a.flatten(0, 1), b, update.alpha, update.magnitude)


def _keys(module: str, update: Update) -> Iterator[tuple[str, Tensor]]:
    yield f"{PREFIX}{module}.lora_A.weight", update.a
    yield f"{PREFIX}{module}.lora_B.weight", update.b
    if update.magnitude is not None:
        yield f"{PREFIX}{module}.lora_magnitude_vector", update.magnitude


def _one_by_one(updates: dict[str, Update], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Experts under the names that their weights have on disk."""
    for disk, where in names.on_disk.items():
        if where.expert is None or where.parameter not in updates:
            continue
        update = updates[where.parameter]
        number, count = where.part
        b = update.b[where.expert].chunk(count)[number]
        yield from _keys(module_of(disk), Update(update.a[where.expert], b, update.alpha))
