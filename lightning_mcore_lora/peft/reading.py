"""An adapter from Hugging Face PEFT's files."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lightning_mcore_lora.peft.adapter import Adapter, Update
from lightning_mcore_lora.peft.files import CONFIG, EMBEDDING, HEAD, PREFIX, TENSORS, UNTIE
from lightning_mcore_lora.peft.names import Names, OnDisk, module_of

_KEY = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
_BASE_CHANGED = ("pissa", "olora", "loftq", "corda", "lora_ga")


def read(directory: Path, names: Names) -> Adapter:
    """Read an adapter.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If it holds what has no place here, naming it.
    """
    for file in (CONFIG, TENSORS):
        if not (directory / file).is_file():
            raise FileNotFoundError(
                f"{directory / file} not found: a PEFT adapter has {CONFIG} and {TENSORS}. An adapter_model.bin may "
                "run code when it is read: load it with PEFT and save it again"
            )
    config = json.loads((directory / CONFIG).read_text())
    _check(config, directory)
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    in_full: dict[str, Tensor] = {}
    for key, value in _tensors(directory / TENSORS).items():
        key = key.removeprefix(PREFIX)
        match = _KEY.fullmatch(key)
        if match:
            found[match[1]][match[2]] = value
        elif "lora_" in key and ".base_layer." not in key:
            raise ValueError(f"{directory / TENSORS}: {key} is not supported (an embedding's or a bias's adapter)")
        elif ".original_module." not in key:
            in_full[key.replace(".modules_to_save.", ".").replace(".base_layer.", ".")] = value
    modules, copies = _in_full(in_full, config, names)
    updates: dict[str, Update] = {}
    experts: dict[str, dict[OnDisk, Update]] = defaultdict(dict)
    for module, parts in found.items():
        if not {"lora_A", "lora_B"} <= set(parts) or (dora and "lora_magnitude_vector" not in parts):
            raise ValueError(f"{directory / TENSORS} has only {sorted(parts)} of {module}")
        parameter, one = _parameter(module, config, names)
        alpha = _by_pattern(
            config.get("alpha_pattern"), parameter if one is None else module, config.get("lora_alpha", 8)
        )
        update = Update(parts["lora_A"], parts["lora_B"], alpha, parts.get("lora_magnitude_vector"))
        if one is not None:
            experts[parameter][one] = update
        else:
            updates[parameter] = _stacked(update, names) if names.by_parameter[parameter].is_expert else update
    updates |= {parameter: _together(parameter, given, names, rslora) for parameter, given in experts.items()}
    if not updates:
        raise ValueError(f"{directory / TENSORS} holds no LoRA factors")
    return Adapter(updates, rslora, dora, config.get("lora_dropout") or 0.0, modules, copies)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _in_full(
    tensors: dict[str, Tensor], config: dict[str, Any], names: Names
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was trained in full, and what PEFT adds of the base: the embedding and the output layer, in some cases."""
    named = config.get("modules_to_save") or ()
    modules: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}

    def is_trained(name: str) -> bool:
        module = module_of(name)
        return any(module == end or module.endswith(f".{end}") for end in named)

    for name, value in tensors.items():
        follows = names.hf.tied and name == HEAD and is_trained(EMBEDDING)
        (modules if follows or is_trained(name) else copies)[name] = value
        if name in (EMBEDDING, HEAD) and value.shape[0] != names.hf.vocab_size:
            raise ValueError(
                f"{name} of the adapter has {value.shape[0]} rows, the base vocab_size={names.hf.vocab_size}: the "
                "vocabulary was resized. Resize the base too (resize_token_embeddings in transformers), and save it"
            )
    if names.hf.tied:
        if EMBEDDING in modules and not (HEAD in modules and torch.equal(modules[HEAD], modules[EMBEDDING])):
            raise ValueError(
                "the adapter has an embedding trained in full that the output layer did not follow, and the base's two "
                f"are tied: train with ensure_weight_tying=True, or {UNTIE}"
            )
        if HEAD in modules and EMBEDDING not in modules:
            raise ValueError(
                f"the adapter has an output layer trained in full, and the base's is tied to the embedding: {UNTIE}"
            )
        modules.pop(HEAD, None)
        copies.pop(HEAD, None)
    return modules, copies


def _check(config: dict[str, Any], directory: Path) -> None:
    allowed = {
        "peft_type": ("LORA",),
        "bias": ("none", None),
        "fan_in_fan_out": (False, None),
        "lora_bias": (False, None),
        "use_qalora": (False, None),
        "layer_replication": (None,),
        "alora_invocation_tokens": (None,),
        "trainable_token_indices": (None,),
        "use_bdlora": (None, False),
        "arrow_config": (None,),
    }
    for name, values in allowed.items():
        if config.get(name) not in values:
            raise ValueError(f"{name}={config[name]!r} in {directory / CONFIG} is not supported; only {values[0]!r} is")
    initial = str(config.get("init_lora_weights", True)).lower()
    if initial.startswith(_BASE_CHANGED):
        raise ValueError(
            f"init_lora_weights={initial!r} in {directory / CONFIG}: it changed the base weights. Save the adapter "
            "with PEFT's path_initial_model_for_weight_conversion first"
        )


def _by_pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """As PEFT does: the pattern describes the end of the name."""
    names = {name, name.removesuffix(".weight")}
    matches = (value for key, value in (patterns or {}).items() if any(re.match(rf"(.*\.)?({key})$", n) for n in names))
    return next(matches, default)


def _parameter(module: str, config: dict[str, Any], names: Names) -> tuple[str, OnDisk | None]:
    """The parameter that a module's adapter is for, and which part of it if that is one expert's.

    Raises:
        ValueError: If the model has none.
    """
    weight = f"{module}.weight"
    if weight in names.by_parameter:
        return weight, None
    if weight in names.on_disk:
        where = names.on_disk[weight]
        return where.parameter, None if where.expert is None else where
    depth = len(re.findall(r"\.base_layer", module))
    owner = module.replace(".base_layer", "")
    targeted = config.get("target_parameters") or ()
    inside = [
        name
        for name in names.by_parameter
        if module_of(name) == owner and any(name == t or name.endswith(f".{t}") for t in targeted)
    ]
    if depth >= len(inside):
        kind = names.hf.settings["model_type"]
        raise ValueError(
            f"the adapter is for {module}, where a {kind} has no linear that can have one here: train without it, or "
            "merge it with PEFT"
        )
    return inside[len(inside) - 1 - depth], None


def _stacked(update: Update, names: Names) -> Update:
    a = update.a.unflatten(0, (names.experts, -1))
    b = update.b.unflatten(1, (-1, names.experts)).permute(2, 0, 1)
    return Update(a, b.contiguous(), update.alpha)


def _together(parameter: str, given: dict[OnDisk, Update], names: Names, rslora: bool) -> Update:
    """Experts that were one by one, in one; gate and up with different A become blocks."""
    wanted = [where for where in names.on_disk.values() if where.parameter == parameter]
    missing = [where for where in wanted if where not in given]
    if missing:
        raise ValueError(f"{parameter}: the adapter has some experts' parts, and not {missing[0]}")
    first = next(iter(given.values()))
    if any((update.rank, update.alpha) != (first.rank, first.alpha) for update in given.values()):
        raise ValueError(f"{parameter}: experts differ in rank or alpha, which is not supported")
    each = [[given[where] for where in wanted if where.expert == e] for e in range(names.experts)]
    if all(torch.equal(parts[0].a, part.a) for parts in each for part in parts):
        a, b, alpha = [parts[0].a for parts in each], [torch.cat([p.b for p in parts]) for parts in each], first.alpha
    else:
        a = [torch.cat([p.a for p in parts]) for parts in each]
        b = [torch.block_diag(*(p.b for p in parts)) for parts in each]
        alpha = first.alpha * (len(each[0]) ** 0.5 if rslora else len(each[0]))
    magnitude = None
    if first.magnitude is not None:
        magnitude = torch.stack([torch.cat([p.magnitude for p in parts if p.magnitude is not None]) for parts in each])
    return Update(torch.stack(a), torch.stack(b), alpha, magnitude)
