"""What the user chooses about adapters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_mcore_lora.adapters.experts import EACH
from lightning_mcore_lora.adapters.initial import INITIAL
from lightning_mcore_lora.adapters.matching import check_pattern
from lightning_mcore_lora.adapters.placement import MODES

SEQUENCE_MODES = ("auto", *MODES)
DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
INITS = tuple(INITIAL)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoRAConfig:
    r"""Settings of low-rank adapters.

    Modules are named by patterns: a name, ``linear_qkv`` or ``self_attention.linear_qkv``, is the end of a module's
    path; the component ``*`` stands for one or more whole components, so ``*.layers.1.*`` is layer 1 and not layer 11.
    Layers are numbered over the whole model, from 0.

    Args:
        rank: Width r of the factors A ``[rank, d_in]`` and B ``[d_out, rank]``.
        alpha: The adapter's output is scaled by ``alpha / rank``.
        target_modules: Linears to adapt.
        exclude_modules: Linears to leave out of ``target_modules``.
        layers_to_transform: Numbers of the layers to adapt; ``None`` is all, and what lies outside of layers.
        rank_pattern: Pattern to rank, for linears that differ; the first that matches counts.
        alpha_pattern: Pattern to alpha, in the same way.
        modules_to_save: Modules to train in full beside the adapters, norms or the output layer for example.
        dropout: Probability with which an element of the adapter's input is zero in training. For backward a seed is
            kept, not the mask.
        rslora: Scale by ``alpha / sqrt(rank)`` (https://arxiv.org/abs/2312.03732).
        dora: Train a magnitude of each output row beside the direction (https://arxiv.org/abs/2402.09353); its norm is
            taken as a constant in backward, as there in section 4.3.
        canonical: Give q, k and v, and gate and up, factors of their own, as they have in Hugging Face models; or
            patterns of the fused linears whose parts get them.
        freeze_a: Train B alone (LoRA-FA, https://arxiv.org/abs/2308.03303): the input is then not kept at all.
        init: How A begins: ``"kaiming"`` is uniform within ``1 / sqrt(d_in)``, as in PEFT; ``"xavier"`` is uniform
            within ``sqrt(6 / (d_in + rank))``; ``"gaussian"`` has the standard deviation ``1 / rank``. B begins at 0.
        expert_adapters: What experts of a layer share: ``"per_expert"`` nothing; ``"shared_outer"`` the factor at the
            hidden size, A of ``linear_fc1`` and B of ``linear_fc2``; ``"shared"`` both factors. What is shared is one
            logical tensor at any expert-parallel size. A ``dora`` magnitude is always each expert's own.
        normalize_expert_rank: Divide ``rank`` by the experts that a token goes to (``moe_router_topk``) at expert
            linears, so that a token meets as many adapter parameters there as in a dense layer. The scale is alpha over
            the divided rank. Ranks of ``rank_pattern`` are taken as they are.
        dtype: Dtype of the factors, ``"float32"`` or ``"bfloat16"``. The strategy trains float32 masters of the latter.
        sequence_mode: What a column-parallel site does under sequence parallelism: ``"local"`` applies A to the
            sequence shard and gathers only the rank-wide result; ``"regather"`` keeps the shard and gathers the input
            again in backward; ``"gather"`` keeps the gathered input; ``"auto"`` is ``"local"`` wherever it is exact.
            ``gather`` and ``regather`` need a rank divisible by the tensor-parallel size.
        recompute_inputs: Keep what the base keeps anyway, and compute the adapter's input from it in backward.
        seed: Seed of the initial A. A does not depend on the parallel layout.

    Raises:
        ValueError: If a setting is out of range, naming it.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = DEFAULT_TARGETS
    exclude_modules: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    canonical: bool | tuple[str, ...] = False
    freeze_a: bool = False
    init: str = "kaiming"
    expert_adapters: str = "per_expert"
    normalize_expert_rank: bool = False
    dtype: str = "float32"
    sequence_mode: str = "auto"
    recompute_inputs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise ValueError(f"{_of('rank', name)}={rank!r} must be a positive integer")
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
                raise ValueError(f"{_of('alpha', name)}={alpha!r} must be a positive number")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be a number, at least 0 and below 1")
        if self.init == "pissa":
            raise ValueError(
                "init='pissa' is not supported: it changes the frozen base weights, which neither an adapter's "
                f"checkpoint nor its PEFT export holds. Choose one of {INITS}"
            )
        choices = {
            "init": INITS,
            "expert_adapters": tuple(EACH),
            "dtype": tuple(DTYPES),
            "sequence_mode": SEQUENCE_MODES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {known}")
        lists = ["target_modules", "exclude_modules", "modules_to_save"]
        for name in lists if isinstance(self.canonical, bool) else [*lists, "canonical"]:
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a list of names, not one string")
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list, from YAML
        if self.layers_to_transform is not None:
            given = self.layers_to_transform
            layers = (given,) if isinstance(given, int) else tuple(given)
            if not layers or not all(type(layer) is int for layer in layers):
                raise ValueError(f"layers_to_transform={given!r} must be numbers of layers, from 0")
            object.__setattr__(self, "layers_to_transform", layers)
        if not self.target_modules:
            raise ValueError("target_modules is empty: name at least one linear, for example 'linear_qkv'")
        for setting, pattern in self.patterns():
            check_pattern(setting, pattern)

    def patterns(self) -> list[tuple[str, str]]:
        """Setting and pattern of each that the user gave."""
        names = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "modules_to_save")
        patterns = [(name, pattern) for name in names for pattern in getattr(self, name)]
        return (
            patterns if isinstance(self.canonical, bool) else [*patterns, *(("canonical", p) for p in self.canonical)]
        )


def _of(setting: str, name: str) -> str:
    return setting if name == setting else f"{setting}_pattern[{name!r}]"
