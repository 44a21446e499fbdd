"""What a checkpoint says about itself, in JSON: format, base model, adapters, layout, versions, sums of its files."""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.checkpoint.errors import CheckpointError
from lightning_mcore_lora.checkpoint.place import MANIFEST as NAME
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes

FORMAT_VERSION = 2
_PACKAGES = ("lightning-mcore-lora", "lightning", "megatron-core", "torch", "transformer-engine")
#: What of a base model's config its weights and its function depend on.
_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
)
#: Settings of adapters that change what the same factors compute.
_FUNCTION = (
    "rank",
    "alpha",
    "rank_pattern",
    "alpha_pattern",
    "rslora",
    "dora",
    "canonical",
    "expert_adapters",
    "normalize_expert_rank",
)


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` holds.

    Args:
        format_version: Of the directory.
        step: Optimizer step, where a trainer counted it.
        weights: ``"trained"``, or ``"all"`` with the frozen base.
        optimizer: Whether a run can continue from it.
        base: Name of the base model, its path in the module, its Hugging Face config, hashes of its config and of a
            frozen norm.
        lora: The adapters' settings.
        layout: Parallel sizes.
        packages: Versions.
        files: Name to size and SHA-256 of every other file.
    """

    format_version: int
    step: int | None
    weights: str
    optimizer: bool
    base: dict[str, Any]
    lora: dict[str, Any] | None
    layout: dict[str, Any]
    packages: dict[str, str]
    files: dict[str, dict[str, int | str]]

    @property
    def sizes(self) -> ParallelSizes:
        """The layout that it was saved at."""
        return ParallelSizes(**self.layout)

    def write(self, directory: Path) -> None:
        """Write it, with a sum of its own."""
        content = asdict(self) | {"files": dict(sorted(self.files.items()))}
        text = json.dumps(content | {"sha256": _digest(content)}, indent=2)
        (directory / NAME).write_text(text + "\n")

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check it.

        Raises:
            CheckpointError: If it is absent, damaged or of another format.
        """
        file = directory / NAME
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{directory} is not a complete checkpoint of this package: it has no {NAME}")
        try:
            content = json.loads(file.read_text())
            found = content["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"damaged: {NAME} cannot be read ({error})") from error
        if found != FORMAT_VERSION:
            way_out = "update this package" if found > FORMAT_VERSION else "read it with the version that wrote it"
            raise CheckpointError(f"it has format_version={found}, this version reads {FORMAT_VERSION}: {way_out}")
        if content.pop("sha256", None) != _digest(content):
            raise CheckpointError(f"damaged: {NAME} has changed. Use another checkpoint, or a copy of this one")
        return cls(**content)


def describe(
    module: nn.Module,
    parallel: ParallelContext,
    step: int | None,
    everything: bool,
    optimizer: bool,
) -> Manifest:
    """The manifest of a module's checkpoint, but for its files."""
    config = adapter_config(module)
    return Manifest(
        format_version=FORMAT_VERSION,
        step=step,
        weights="all" if everything else "trained",
        optimizer=optimizer,
        base=base_identity(module),
        lora=None if config is None else json.loads(json.dumps(asdict(config))),
        layout=asdict(parallel.sizes),
        packages=_packages(),
        files={},
    )


def adapter_config(module: nn.Module) -> Any:
    """The settings of a module's adapters, or ``None``."""
    return next((adapter.config for _, adapter in adapters(module)), None)


def base_identity(module: nn.Module) -> dict[str, Any]:
    """What tells a base model from others, the same at every layout and in every precision."""
    bases = ((path, m) for path, m in module.named_modules() if hasattr(m, "config") and "decoder" in m._modules)
    path, model = next(bases, (None, None))
    if model is None:
        return {"name": None, "path": None, "hf_config": None, "config_sha256": None, "norm_sha256": None}
    facts = {name: getattr(model.config, name, None) for name in _ARCHITECTURE}
    facts |= {name: getattr(model, name, None) for name in ("vocab_size", "rotary_base")}
    facts["activation"] = getattr(getattr(model.config, "activation_func", None), "__name__", None)
    norm = getattr(getattr(model.decoder, "final_layernorm", None), "weight", None)
    return {
        "name": Path(model.base_path).name if getattr(model, "base_path", None) else None,
        "path": path,
        "hf_config": getattr(model, "hf_config", None),
        "config_sha256": _digest(facts),
        "norm_sha256": None if norm is None or norm.requires_grad else hashlib.sha256(_bytes(norm)).hexdigest(),
    }


def differences(manifest: Manifest, module: nn.Module) -> list[str]:
    """In what a module is another than the one that was saved, so that its adapters would compute something else."""
    found = []
    base = base_identity(module)
    saved, here = manifest.base["config_sha256"], base["config_sha256"]
    if saved and here and saved != here:
        names = [what["name"] or "a model without a name" for what in (manifest.base, base)]
        found.append(f"the base model is {names[1]}, not {names[0]}: their configs differ")
    config = adapter_config(module)
    if manifest.lora is not None and config is not None:
        settings = json.loads(json.dumps(asdict(config)))
        found += [
            f"{name}={settings[name]!r} in LoRAConfig, saved with {manifest.lora[name]!r}"
            for name in _FUNCTION
            if settings[name] != manifest.lora[name]
        ]
    return found


def other_weights(manifest: Manifest, module: nn.Module) -> bool:
    """Whether the base has other weights than the one that was saved, as far as one norm shows."""
    saved, here = manifest.base["norm_sha256"], base_identity(module)["norm_sha256"]
    return bool(saved and here and saved != here)


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
