"""The tiny Llama with the adapters of PEFT itself, and the same adapters in workers through the package."""

import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import tiny
from tests.oracle import Oracle
from tests.runs import CLIP, FullModule, places, trainer

#: Module of the Megatron-Core model to its name in the Hugging Face model, where it is trained in full.
MODULES = {
    "input_layernorm": "model.layers.{}.input_layernorm",
    "pre_mlp_layernorm": "model.layers.{}.post_attention_layernorm",
    "final_layernorm": "model.norm",
    "output_layer": "lm_head",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One set of options, in the package's words and in PEFT's.

    Args:
        ours: Fields of ``LoRAConfig``.
        peft: Fields of PEFT's ``LoraConfig``.
    """

    ours: dict[str, Any]
    peft: dict[str, Any]


def _owner(site: str) -> tuple[str, str]:
    return ("mlp", "mlp") if "fc" in site else ("self_attention", "self_attn")


def values(layer: int, name: str, rank: int, d_in: int, d_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and magnitude of one Hugging Face linear; random, always the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer}.{name}".encode()))
    a = torch.randn(rank, d_in, generator=generator) * d_in**-0.5
    b = torch.randn(d_out, rank, generator=generator) * 0.1
    return a, b, torch.rand(d_out, generator=generator) + 1.0


class PeftOracle(Oracle):
    """One process, float64, transformers and PEFT.

    Args:
        directory: Where the model is.
        variant: What PEFT is asked for.
    """

    def __init__(self, directory: Path, variant: Variant) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers import LlamaForCausalLM

        self.precision = None
        self.variant = variant
        model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
        settings = {"r": tiny.RANK, "lora_alpha": tiny.ALPHA, "lora_dropout": 0.0, "target_modules": "all-linear"}
        targets = [name for parts in tiny.OUTPUTS.values() for name in parts]
        settings = settings | {"target_modules": targets} | variant.peft
        inject_adapter_in_model(LoraConfig(**settings), model)
        model.double()
        self.model = model
        self.named: dict[str, dict[str, nn.Parameter]] = {}
        for i, layer in enumerate(model.model.layers):
            for site, parts in tiny.OUTPUTS.items():
                ours, theirs = _owner(site)
                path = f"decoder.layers.{i}.{ours}.{site}.lora"
                for name, rows in parts.items():
                    linear = getattr(getattr(layer, theirs), name)
                    if not hasattr(linear, "lora_A"):
                        continue
                    a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
                    held = {"a": a, "b": b}
                    if variant.peft.get("use_dora"):
                        held["magnitude"] = linear.lora_magnitude_vector["default"].weight
                    for value, parameter in zip(values(i, name, len(a), tiny.D_IN[site], rows), held.values()):
                        parameter.data.copy_(value)
                    for factor, parameter in held.items():
                        self.named.setdefault(f"{path}.{factor}", {})[name] = parameter
        for pattern in variant.ours.get("modules_to_save", ()):
            for i in range(tiny.LAYERS):
                module = model.get_submodule(MODULES[pattern].format(i)).requires_grad_(True)
                inside = f"decoder.layers.{i}." if "{}" in MODULES[pattern] else "decoder." if "norm" in pattern else ""
                self.named[f"{inside}{pattern}.weight"] = {"weight": module.weight}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything that trains."""
        for parts in self.named.values():
            yield from parts.values()

    def _fused(self, of: str) -> dict[Any, Tensor]:
        fused = {}
        for path, parts in self.named.items():
            read = {name: (p.grad if of == "grad" else p).detach().clone() for name, p in parts.items()}
            site = path.split(".")[-3] if ".lora." in path else ""
            by_rows = path.endswith((".b", ".magnitude"))
            fused[path] = tiny.fuse_rows(site, read) if by_rows else torch.cat(list(read.values()))
        return fused


class VariantModule(FullModule):
    """Begins with the values that PEFT got."""

    def on_fit_start(self) -> None:
        from lightning_mcore_lora.adapters import adapters

        for _, adapter in adapters(self.model):
            layer, site = int(adapter.site.name.split("layers.")[1].split(".")[0]), adapter.site.leaf
            parts = {
                name: values(layer, name, adapter.plan.rank, tiny.D_IN[site], rows)
                for name, rows in tiny.OUTPUTS[site].items()
            }
            a = torch.cat([value[0] for value in parts.values()])
            b, magnitude = (tiny.fuse_rows(site, {name: v[i] for name, v in parts.items()}) for i in (1, 2))
            adapter.load_full(a, b, magnitude)


def train(directory: str, tp: int, sequence: bool, variant: Variant, mode: str) -> dict[str, Any]:
    """Five steps; returns this rank's view by parameter name."""
    from lightning_mcore_lora import LoRASPCallback, MCoreTP

    strategy = MCoreTP(tensor_parallel_size=tp, sequence_parallel=sequence)
    settings = {"rank": tiny.RANK, "alpha": tiny.ALPHA, "canonical": True} | variant.ours
    lora = LoRASPCallback(sequence_mode=mode, verbose=False, **settings)
    module = VariantModule(directory)
    trainer(strategy, None, callbacks=(lora,)).fit(module)
    trained = strategy.engine.tensors(module.model).trained
    return {
        **places(trained, strategy.parallel),
        "norms": module.norms,
        "losses": module.losses,
        "input_gradient": module.inputs[0].grad,
        "gradients": module.gradients,
        "weights": {name: p.detach().clone() for name, p in trained.items()},
    }


def resume(directory: str, lora: dict[str, Any], out: str | None, ckpt: str | None) -> dict[str, Tensor]:
    """Four steps at TP=2, saved after two if ``out`` says where; every trained or saved value."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_mcore_lora import LoRASPCallback, MCoreTP

    strategy = MCoreTP(tensor_parallel_size=2)
    callbacks = [LoRASPCallback(rank=tiny.RANK, verbose=False, **lora)]
    if out is not None:
        callbacks.append(ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, save_top_k=-1))
    module = FullModule(directory)
    options = {"max_steps": 4, "enable_checkpointing": out is not None}
    trainer(strategy, None, callbacks=tuple(callbacks), **options).fit(module, ckpt_path=ckpt)
    return {name: p.detach().clone() for name, p in strategy.engine.tensors(module.model).trained.items()}


class LoRAPlusModule(FullModule):
    """One step of plain gradient descent, B four times as fast."""

    def configure_optimizers(self) -> Any:
        from lightning_mcore_lora import lora_plus_groups

        return torch.optim.SGD(lora_plus_groups(self, lr=0.5, ratio=4.0))


def lora_plus(directory: str) -> dict[str, float]:
    """The rate at which each kind of parameter moved."""
    from lightning_mcore_lora import LoRASPCallback, MCoreTP
    from lightning_mcore_lora.adapters import adapters

    class Begin(LoRASPCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for _, adapter in adapters(pl_module):
                nn.init.normal_(adapter.b, generator=torch.Generator().manual_seed(1))
            self.before = {n: p.detach().clone() for n, p in pl_module.model.named_parameters() if p.requires_grad}

    lora = Begin(rank=4, verbose=False, modules_to_save=["final_layernorm"])
    module = LoRAPlusModule(directory)
    trainer(MCoreTP(tensor_parallel_size=2), None, callbacks=(lora,), max_steps=1, gradient_clip_val=None).fit(module)
    after, rates = dict(module.model.named_parameters()), {}
    for name, gradient in module.gradients[0].items():
        moved = (lora.before[name] - after[name].detach()).norm() / gradient.norm()
        rates[name.rpartition(".")[2]] = moved.item()
    return rates


__all__ = ["CLIP", "PeftOracle", "Variant", "lora_plus", "resume", "train"]
