"""What all processes must have in common, compared before anything depends on it."""

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PACKAGES = ("lightning", "megatron-core", "torch", "transformer-engine")


class DisagreementError(RuntimeError):
    """Processes of one run were started with different code or settings."""


def check_same(what: str, facts: Mapping[str, Any]) -> None:
    """Compare facts over all processes. A collective: one hash from each, and the facts only if those differ.

    Args:
        what: What is compared, for the message.
        facts: Name to value; values are compared by their ``repr``.

    Raises:
        DisagreementError: On every rank, naming the facts that differ, the ranks and their values.
    """
    mine = {name: repr(value) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * len(digests)
    torch.distributed.all_gather_object(everyone, mine)
    lines = []
    for name in sorted(set().union(*everyone)):
        values = [other.get(name, "missing") for other in everyone]
        odd = [(rank, value) for rank, value in enumerate(values) if value != values[0]]
        if odd:
            others = ", ".join(f"rank {rank}: {value[:200]}" for rank, value in odd[:3])
            lines.append(f"{name} is {values[0][:200]} on rank 0, but {others}")
    raise DisagreementError(f"{what} differ between processes; start all with the same. " + "; ".join(lines))


def code_facts() -> dict[str, Any]:
    """Versions of Python and packages, and a hash of this package's and the main script's code."""
    facts: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return facts | {"lightning_mcore_lora code": _package_hash(), "main script": _file_hash(main)}


def module_facts(module: nn.Module) -> dict[str, Any]:
    """Hash of every parameter's name and shape, and the names of those that are trainable."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    return {
        "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:12],
        "number of trainable parameters": len(trainable),
        "trainable parameters": hashlib.sha256(repr(trainable).encode()).hexdigest()[:12],
    }


@cache
def _package_hash() -> str:
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _file_hash(path: str | None) -> str | None:
    if path is None or not Path(path).is_file():
        return None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
