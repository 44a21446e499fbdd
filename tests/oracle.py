"""The oracle: one process, float64, transformers, weights as W + s B A. Shares no code with the package."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from tests import tiny


class _LowRank(nn.Module):
    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = a, b, scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.b @ self.a

    def add_to_output(self, linear: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        x = args[0]
        z = nn.functional.linear(x, self.a.to(x.dtype)) * self.scale
        return output + nn.functional.linear(z, self.b.to(z.dtype)).to(output.dtype)


@dataclass
class Run:
    """What a training run gave; factors by (layer, site, "a" or "b"), fused as the package holds them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    input_gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: list[dict[tuple[int, str, str], Tensor]] = field(default_factory=list)
    factors: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)


class Oracle:
    """The tiny Llama with trainable low-rank factors; q, k, v share one A, and so do gate and up.

    Args:
        directory: Where the model is.
        precision: ``None`` is float64, the oracle proper. With one of Lightning's names it is what one process gets in
            that precision: float32 factors, whose product with the input is added to the linear's output.
    """

    def __init__(self, directory: Path, precision: str | None = None) -> None:
        from transformers import LlamaForCausalLM

        self.precision = precision
        dtype = {None: torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self.model.requires_grad_(False)
        self.a: dict[tuple[int, str], nn.Parameter] = {}
        self.b: dict[tuple[int, str], dict[str, nn.Parameter]] = {}
        for i, layer in enumerate(self.model.model.layers):
            for site in tiny.SITES:
                values = tiny.factors(i, site, torch.float32 if precision else torch.float64)
                self.a[i, site] = nn.Parameter(values.a)
                self.b[i, site] = {name: nn.Parameter(value) for name, value in values.b.items()}
                for name, b in self.b[i, site].items():
                    owner = layer.mlp if hasattr(layer.mlp, name) else layer.self_attn
                    low_rank = _LowRank(self.a[i, site], b, tiny.ALPHA / tiny.RANK)
                    if precision:
                        getattr(owner, name).register_forward_hook(low_rank.add_to_output)
                    else:
                        nn.utils.parametrize.register_parametrization(getattr(owner, name), "weight", low_rank)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All factors."""
        yield from self.a.values()
        for parts in self.b.values():
            yield from parts.values()

    def _fused(self, of: str) -> dict[tuple[int, str, str], Tensor]:
        read = (lambda p: p.grad.clone()) if of == "grad" else (lambda p: p.detach().clone())
        result = {}
        for (layer, site), a in self.a.items():
            result[layer, site, "a"] = read(a)
            result[layer, site, "b"] = tiny.fuse_rows(site, {name: read(b) for name, b in self.b[layer, site].items()})
        return result

    def _autocast(self) -> torch.autocast:
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision)
        return torch.autocast("cpu", dtype, enabled=dtype is not None)

    def train(self, clip: float, weights: Tensor | None = None) -> Run:
        """Five optimizer steps.

        Args:
            clip: Bound of the gradient norm.
            weights: Weight of each token's loss ``[samples, sequence]``; sums to the divisor within a step.
        """
        run, optimizer = Run(), torch.optim.AdamW(self.parameters(), lr=1e-3, eps=tiny.ADAM_EPS)
        for samples in tiny.tokens().split(tiny.SAMPLES_PER_STEP):
            embedded = self.model.model.embed_tokens(samples[:, :-1]).detach().requires_grad_()
            with self._autocast():
                logits = self.model(inputs_embeds=embedded).logits
            logits = logits.to(torch.float32 if self.precision else torch.float64)
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
            if weights is None:
                loss = losses.mean()
            else:
                first = len(run.losses) * tiny.SAMPLES_PER_STEP
                mask = weights[first : first + tiny.SAMPLES_PER_STEP].flatten()
                loss = (losses * mask).sum() / mask.sum()
            optimizer.zero_grad()
            scale = 2.0**16 if self.precision == "16-mixed" else 1.0  # of float16 gradients, as a scaler begins
            (loss * scale).backward()
            for parameter in self.parameters():
                parameter.grad /= scale
            run.losses.append(loss.item())
            run.gradients.append(self._fused("grad"))
            if len(run.losses) == 1:
                run.input_gradient = embedded.grad.clone()
            run.norms.append(nn.utils.clip_grad_norm_(list(self.parameters()), clip).item())
            optimizer.step()
        run.factors = self._fused("data")
        return run


def relative_error(value: Tensor, reference: Tensor) -> float:
    """max|error| / max|reference|."""
    assert value.shape == reference.shape, (value.shape, reference.shape)
    return ((value.double() - reference).abs().max() / reference.abs().max()).item()
