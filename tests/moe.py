"""Tiny Qwen mixtures of experts on disk, and their oracle.

The oracle is one process, float64, transformers, weights as ``W + s B A``; it shares no code with the package. Factors
are named as the package names them, and are whole: ``[experts, ...]`` where each expert has its own.
"""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import tiny

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, DENSE_FFN, FFN, SHARED_FFN, TOP_K = 2, 32, 4, 2, 16, 48, 24, 40, 2
RANK, ALPHA, CLIP = 4, 6.0, 0.5
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
STEPS, SAMPLES, MICROBATCHES, SEQUENCE, VOCAB = 5, 8, 2, 12, 96


@dataclass(frozen=True)
class Model:
    """One tiny model.

    Args:
        shared: With shared experts and their gate (Qwen2-MoE); else Qwen3-MoE, with norms of queries and keys.
        experts: Experts of a layer.
        dense: Numbers of layers without experts.
    """

    shared: bool = False
    experts: int = 4
    dense: tuple[int, ...] = ()

    def config(self, **changes: Any) -> Any:
        """The transformers config."""
        from transformers import Qwen2MoeConfig, Qwen3MoeConfig

        settings = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": DENSE_FFN,
            "moe_intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "head_dim": HEAD_DIM,
            "num_experts": self.experts,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": not self.shared,
            "mlp_only_layers": list(self.dense),
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "initializer_range": 0.3,
        } | changes
        if not self.shared:
            return Qwen3MoeConfig(**settings)
        return Qwen2MoeConfig(**settings, shared_expert_intermediate_size=SHARED_FFN)

    def write(self, directory: Path, **changes: Any) -> Path:
        """Save it with random weights: norms that are not one, and experts that are clearly told apart."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(13)
        model = AutoModelForCausalLM.from_config(self.config(**changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("mlp.gate.weight"):
                    parameter.normal_(0, 1.0)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.2)
        model.save_pretrained(directory)
        return directory


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        model: The model.
        lora: Fields of ``LoRAConfig`` beside rank, alpha and targets.
        config: Fields of ``TransformerConfig``, of the workers alone.
        aux: Coefficients of the load-balancing loss and of the z loss.
        weighted: Whether tokens are weighted, and losses given as sums.
        seed: Of the tokens.
    """

    model: Model = field(default_factory=Model)
    lora: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    aux: tuple[float, float] = (0.0, 0.0)
    weighted: bool = False
    seed: int = 3


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Whole values of a factor; random, nonzero, always the same."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("magnitude"):
        return drawn.abs() + 1.0
    return drawn * (shape[-1] ** -0.5 if name.endswith(".a") else 0.15)


def tokens(seed: int) -> Tensor:
    """Samples of ``SEQUENCE + 1`` tokens, in the order in which a run reads them."""
    return torch.randint(0, VOCAB, (STEPS * SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))


def token_weights() -> Tensor:
    """Weight of each token, zero or one, in the order of the samples."""
    generator = torch.Generator().manual_seed(4)
    return (torch.rand(STEPS * SAMPLES, SEQUENCE, generator=generator) < 0.7).to(torch.int64)


class _Adapted(nn.Module):
    """``W + s B A``, with DoRA scaled to its magnitudes; of the given rows of B."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, magnitude: nn.Parameter | None, rows: slice | Tensor) -> None:
        super().__init__()
        self.held = [a, b, magnitude]  # in a list: they are not this module's
        self.rows = rows

    def forward(self, weight: Tensor) -> Tensor:
        a, b, magnitude = self.held
        weight = weight + ALPHA / RANK * b[..., self.rows, :] @ a
        if magnitude is None:
            return weight
        return weight * (magnitude[..., self.rows] / weight.norm(dim=-1).detach())[..., None]


class Oracle:
    """The model with trainable factors.

    Args:
        directory: Where the model is.
        case: What is trained.
    """

    def __init__(self, directory: Path, case: Case) -> None:
        from transformers import AutoModelForCausalLM

        self.case = case
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).requires_grad_(False)
        self.named: dict[str, nn.Parameter] = {}
        self._scores: list[Tensor] = []
        targets = case.lora.get("target_modules", TARGETS)
        for i, layer in enumerate(self.model.model.layers):
            for name, places in self._places(layer, i in case.model.dense).items():
                if any(f".{name}".endswith(f".{target}") for target in targets):
                    self._adapt(f"decoder.layers.{i}.{name}.lora", name, places)
            if i in case.model.dense:
                continue
            if "router" in case.lora.get("modules_to_save", ()):
                self.named[f"decoder.layers.{i}.mlp.router.weight"] = layer.mlp.gate.weight.requires_grad_()
            layer.mlp.gate.register_forward_hook(lambda module, args, output: self._scores.append(output[0]))

    def _places(self, layer: Any, is_dense: bool) -> dict[str, list[tuple[nn.Module, str, slice | Tensor]]]:
        """Name in the package to the modules, the names of their weights, and their rows of the fused weight."""
        attention, mlp, everything = layer.self_attn, layer.mlp, slice(None)
        block = torch.tensor([0] * (HEADS // GROUPS * HEAD_DIM) + [1] * HEAD_DIM + [2] * HEAD_DIM).repeat(GROUPS)
        found: dict[str, Any] = {
            "self_attention.linear_qkv": [
                (getattr(attention, f"{part}_proj"), "weight", (block == i).nonzero()[:, 0])
                for i, part in enumerate("qkv")
            ],
            "self_attention.linear_proj": [(attention.o_proj, "weight", everything)],
        }

        def gated(owner: Any, width: int) -> dict[str, Any]:
            gate, up = slice(0, width), slice(width, 2 * width)
            return {
                "linear_fc1": [(owner.gate_proj, "weight", gate), (owner.up_proj, "weight", up)],
                "linear_fc2": [(owner.down_proj, "weight", everything)],
            }

        if is_dense:
            return found | {f"mlp.{name}": places for name, places in gated(mlp, DENSE_FFN).items()}
        found["mlp.router"] = [(mlp.gate, "weight", everything)]
        found["mlp.experts.linear_fc1"] = [(mlp.experts, "gate_up_proj", everything)]
        found["mlp.experts.linear_fc2"] = [(mlp.experts, "down_proj", everything)]
        if self.case.model.shared:
            shared = gated(mlp.shared_expert, SHARED_FFN)
            found |= {f"mlp.shared_experts.{name}": places for name, places in shared.items()}
        return found

    def _adapt(self, path: str, name: str, places: list[tuple[nn.Module, str, Any]]) -> None:
        weights = [getattr(module, attribute) for module, attribute, _ in places]
        experts = (self.case.model.experts,) if ".experts." in name else ()
        shared = {
            "per_expert": "",
            "shared": "ab",
            "shared_outer": "a" if name.endswith("fc1") else "b",
        }[self.case.lora.get("expert_adapters", "per_expert")]
        d_out, d_in = sum(weight.shape[-2] for weight in weights), weights[0].shape[-1]
        shapes = {"a": (RANK, d_in), "b": (d_out, RANK), "magnitude": (d_out,)}
        held = {}
        for factor, shape in shapes.items():
            whole = shape if factor in shared else experts + shape
            if factor != "magnitude" or self.case.lora.get("dora"):
                held[factor] = nn.Parameter(values(f"{path}.{factor}", whole).double())
                self.named[f"{path}.{factor}"] = held[factor]
        for module, attribute, rows in places:
            adapted = _Adapted(held["a"], held["b"], held.get("magnitude"), rows)
            nn.utils.parametrize.register_parametrization(module, attribute, adapted)

    def _auxiliary(self, shares: Tensor) -> Tensor:
        """Load-balancing (Switch) and z loss of each replica's tokens, weighted by its share, summed over layers."""
        balance, z = self.case.aux
        total = torch.zeros((), dtype=torch.float64)
        for scores in self._scores:
            of_samples = scores.unflatten(0, (-1, SEQUENCE))
            for replica, share in enumerate(shares):
                logits = of_samples[replica :: len(shares)].flatten(0, 1)
                load = torch.zeros_like(logits).scatter(1, logits.topk(TOP_K).indices, 1).mean(0) / TOP_K
                loss = balance * self.case.model.experts * (load * logits.softmax(-1).mean(0)).sum()
                total = total + share * (loss + z * logits.logsumexp(-1).square().mean())
        return total

    def _gap(self) -> float:
        """How far the last chosen expert is from the first that is not: routing must not hang on rounding."""
        gaps = [s.topk(TOP_K + 1).values for s in self._scores]
        return min((gap[:, -2] - gap[:, -1]).min().item() for gap in gaps)

    def train(self, steps: int = STEPS, replicas: int = 1) -> dict[str, Any]:
        """Optimizer steps of two microbatches, which each replica shares in, with auxiliary losses of its own."""
        result: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "gap": 1.0}
        optimizer = torch.optim.AdamW(self.named.values(), lr=1e-3, eps=tiny.ADAM_EPS)
        weights = token_weights() if self.case.weighted else torch.ones(STEPS * SAMPLES, SEQUENCE)
        batches = zip(tokens(self.case.seed).split(SAMPLES)[:steps], weights.split(SAMPLES), strict=False)
        for samples, mask in batches:
            optimizer.zero_grad()
            total = 0.0
            parts = zip(samples.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True)
            for part, counted in parts:
                embedded = self.model.model.embed_tokens(part[:, :-1]).detach().requires_grad_()
                logits = self.model(inputs_embeds=embedded).logits
                losses = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
                loss = (losses * counted.flatten()).sum() / mask.sum()
                result["gap"] = min(result["gap"], self._gap())
                # The auxiliary losses of a replica's microbatch weigh as its tokens do.
                shares = torch.stack([counted[i::replicas].sum() for i in range(replicas)]) / mask.sum()
                (loss + self._auxiliary(shares)).backward()
                self._scores.clear()
                total += loss.item()
                result.setdefault("input_gradient", embedded.grad.clone())
            result["losses"].append(total)
            result["gradients"].append({name: p.grad.clone() for name, p in self.named.items()})
            result["norms"].append(nn.utils.clip_grad_norm_(list(self.named.values()), CLIP).item())
            optimizer.step()
        result["weights"] = {name: p.detach().clone() for name, p in self.named.items()}
        return result
