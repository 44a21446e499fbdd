"""How much memory a run will need, from formulas: before it is launched, without processes or weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table

from lightning_mcore_lora.adapters.config import DTYPES, LoRAConfig
from lightning_mcore_lora.adapters.cost import Cost, predict, trained_parameters
from lightning_mcore_lora.adapters.matching import layer_of
from lightning_mcore_lora.adapters.planning import Planned, plan_lora
from lightning_mcore_lora.adapters.report import SiteReport
from lightning_mcore_lora.memory.activations import STAGES, Work, activation_input, base_bytes, loss_bytes, norm_input
from lightning_mcore_lora.memory.readings import GIB, said, unit_of
from lightning_mcore_lora.memory.skeleton import LAYERS, build_skeleton, is_mixture
from lightning_mcore_lora.models.described import Source, describe, transformer_config, with_overrides
from lightning_mcore_lora.models.vocabulary import padded_size
from lightning_mcore_lora.parallel import ParallelSizes


class Precision(NamedTuple):
    """One row of :data:`PRECISIONS`.

    Args:
        weights: Dtype of the base.
        activations: Dtype of activations.
    """

    weights: torch.dtype
    activations: torch.dtype


PRECISIONS: dict[str, Precision] = {
    "32-true": Precision(torch.float32, torch.float32),
    "bf16-true": Precision(torch.bfloat16, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16),
    "16-mixed": Precision(torch.float32, torch.float16),
}

#: Bytes of state for each trained parameter, by name of the torch optimizer.
OPTIMIZERS: dict[str, int] = {"adamw": 8, "adam": 8, "sgd": 0, "sgd with momentum": 4, "adagrad": 4, "rmsprop": 4}

_ANYWHERE = "temporaries inside kernels and the optimizer, data waiting in loaders"
NOT_COUNTED = {
    "cuda": f"CUDA's context (about 0.5 GiB), NCCL's and user buffers, memory lost to fragmentation, {_ANYWHERE}",
    "cpu": f"Python and its libraries (about 0.5 GiB), gloo's buffers, {_ANYWHERE}",
}
#: Fields of the model's config that change what a layer keeps, or is, in ways that are not modelled.
NOT_MODELLED = (
    "attention_output_gate",
    "context_parallel_size",
    "cpu_offloading",
    "experimental_attention_variant",
    "fine_grained_activation_offloading",
    "fp4",
    "fp8",
    "fp32_residual_connection",
    "mtp_num_layers",
    "multi_latent_attention",
    "pipeline_model_parallel_size",
)
_PROMOTED = "the float32 that activations become where biases are added under mixed precision (up to a half more)"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the most loaded rank, at the peak of a training step.

    Args:
        components: Name to bytes, in the order of the table; they sum to :attr:`total`.
        sites: Each site that gets an adapter: how it runs, why not as asked, and what it costs.
        arguments: What was given to :func:`estimate_memory`.
        settings: What was assumed, for the table.
        after_forward: Bytes that forward leaves for backward; weights, gradients and what lives for a while left out.
        is_mixture: Whether any layer holds experts.
        expert_share: Share of what trains that each expert has of its own.
        not_counted: What there is beside.
    """

    components: dict[str, int]
    sites: tuple[SiteReport, ...]
    arguments: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    after_forward: int = 0
    is_mixture: bool = False
    expert_share: float = 0.0
    not_counted: str = ""

    def again(self, **changes: Any) -> "MemoryEstimate":
        """The estimate with other arguments, the rest as it was."""
        return estimate_memory(**{**self.arguments, **changes})

    @property
    def sizes(self) -> ParallelSizes:
        """The layout."""
        return self.arguments["sizes"]

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a microbatch."""
        return self.arguments["micro_batch_size"]

    @property
    def sequence_length(self) -> int:
        """Tokens of each."""
        return self.arguments["sequence_length"]

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.components.values())

    @property
    def total_gib(self) -> float:
        """The peak in GiB."""
        return self.total / GIB

    @property
    def largest(self) -> list[tuple[str, int]]:
        """Components from the largest on."""
        return sorted(self.components.items(), key=lambda item: -item[1])

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data, bytes throughout."""
        return {
            "total": self.total,
            "components": self.components,
            "layout": vars(self.sizes),
            "micro_batch_size": self.micro_batch_size,
            "sequence_length": self.sequence_length,
            "settings": self.settings,
            "not_counted": self.not_counted,
        }

    def __rich__(self) -> Table:
        """A table of the components in GiB."""
        sizes = self.sizes
        table = Table(
            title=f"Memory of the most loaded rank: {said(self.total)}",
            caption="\n".join(
                (
                    f"TP={sizes.tensor}, SP {'on' if sizes.sequence_parallel else 'off'}, EP={sizes.expert}, "
                    f"ETP={sizes.expert_tensor}, {sizes.world_size} process(es); microbatches of "
                    f"{self.micro_batch_size} x {self.sequence_length:,} tokens",
                    ", ".join(f"{name}={value}" for name, value in self.settings.items()),
                    f"not counted: {self.not_counted}",
                )
            ),
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("component")
        name, unit = unit_of(self.total)
        table.add_column(name, justify="right")
        table.add_column("share", justify="right")
        for name, count in self.components.items():
            table.add_row(name, f"{count / unit:.3f}", f"{100 * count / self.total:.1f} %")
        return table


def estimate_memory(
    source: Source,
    sizes: ParallelSizes,
    *,
    sequence_length: int,
    micro_batch_size: int = 1,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
    lora: LoRAConfig | None = None,
    accelerator: str = "cuda",
    layers: str | None = None,
    attention: str | None = None,
    expert_imbalance: float = 1.0,
    vocab_size: int | None = None,
    tied: bool = False,
    **overrides: Any,
) -> MemoryEstimate:
    """Estimate the memory of LoRA tuning on the most loaded rank.

    Weights, gradients, optimizer state and the adapters' part are exact; what the base keeps for backward follows
    Megatron-Core's layers term by term.

    Args:
        source: A Hugging Face model directory, the content of its ``config.json``, or a ``TransformerConfig``.
        sizes: The layout.
        sequence_length: Tokens of a sequence.
        micro_batch_size: Sequences of a microbatch on one data-parallel replica.
        precision: Lightning's setting. With a mixed one biases of ``local`` layers make activations float32, which is
            not counted, and the estimate says so.
        optimizer: Name of a torch optimizer, one of ``OPTIMIZERS``.
        lora: The adapters; ``None`` is ``LoRAConfig()``.
        accelerator: ``"cuda"`` or ``"cpu"``.
        layers: ``"te"`` for Transformer Engine's layers or ``"local"`` for Megatron-Core's own; ``None`` is the former
            on CUDA, the latter on the CPU.
        attention: ``"flash"`` keeps no scores, ``"unfused"`` does; ``None`` is what the layers use: Transformer
            Engine's flash in half precision, and without in float32, which it has no kernels for.
        expert_imbalance: Tokens that the busiest rank's experts get, over the mean.
        vocab_size: Tokens. Read from the directory; required with a ``TransformerConfig``.
        tied: Whether the output layer is the embedding. Read from the directory.
        **overrides: Fields of ``TransformerConfig``, for example ``recompute_granularity="full"``.

    Returns:
        The estimate; ``print`` it with rich.

    Raises:
        ParallelSizeError: If the model or the sequence cannot be split so.
        NotImplementedError: If Megatron-Core cannot express the model.
        ValueError: If a setting is unknown.
    """
    if layers is None:
        layers = "local" if accelerator == "cpu" else "te"
    for name, value, known in (
        ("accelerator", accelerator, ("cuda", "cpu")),
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("layers", layers, LAYERS),
        ("attention", attention, (None, "flash", "unfused")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {list(known)}")
    for name, number in (("sequence_length", sequence_length), ("micro_batch_size", micro_batch_size)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be a positive integer")
    if attention == "flash" and PRECISIONS[precision].activations.itemsize == 4:
        raise ValueError(f"attention='flash' has no float32 kernels: with precision={precision!r} it is 'unfused'")
    if not expert_imbalance >= 1:
        raise ValueError(f"expert_imbalance={expert_imbalance!r} must be at least 1, which is no imbalance")
    lora = LoRAConfig() if lora is None else lora
    described = describe(source, vocab_size=vocab_size, max_sequence_length=sequence_length, tied=tied)
    weights, activations = PRECISIONS[precision]
    config = transformer_config(
        with_overrides(described.fields | {"params_dtype": weights}, overrides), sizes, layers == "te"
    )
    sizes.check_sequence(sequence_length)
    work = Work(
        config,
        sizes,
        micro_batch_size,
        sequence_length,
        activations.itemsize,
        weights.itemsize,
        te=layers == "te",
        flash=attention == "flash" if attention else layers == "te" and activations.itemsize < 4,
        on_cpu=accelerator == "cpu",
        imbalance=expert_imbalance,
    )
    model = build_skeleton(config, sizes, layers, described.vocab_size, described.tied)
    planned = plan_lora(model, lora)
    trained = _trained(planned, lora)
    first = first_trained(planned, config.num_layers)
    mixtures = is_mixture(config)
    kept, again = base_bytes(work, mixtures, first)
    costs = _costs(planned, lora, work)
    vocabulary = padded_size(described.vocab_size, sizes.tensor) // sizes.tensor
    loss, beside = loss_bytes(work, vocabulary)
    adapters = sum(cost.kept(work.tokens) for cost in costs.values())
    if config.recompute_granularity is None:
        for name, count in _first_source(planned, first, work).items():
            kept[name] = kept.get(name, 0.0) + count
    full = _inputs_of_trained(planned, work)
    again += _again(planned, costs, work)
    after_forward = sum(kept.values()) + adapters + full + loss
    components = {
        "base weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "adapter weights": trained.adapters,
        "float32 masters": trained.masters,
        "gradients": 4 * trained.parameters,
        "optimizer state": OPTIMIZERS[optimizer] * trained.parameters,
        **kept,
        "adapters' inputs and z": adapters,
        "inputs of what trains in full": full,
        "softmax of the loss": loss,
        # Both are not there at once: the loss is gone when layers are computed again.
        "logits, or layers computed again": max(beside, again - loss),
    }
    return MemoryEstimate(
        components={name: math.ceil(count) for name, count in components.items() if count},
        sites=tuple(
            SiteReport(site.name, site.kind, mode=plan.placement.mode, reason=plan.fallback, cost=costs[site.name])
            for site, plan in planned.sites
            if not isinstance(plan, str)
        ),
        arguments={
            "source": source,
            "sizes": sizes,
            "sequence_length": sequence_length,
            "micro_batch_size": micro_batch_size,
            "precision": precision,
            "optimizer": optimizer,
            "lora": lora,
            "accelerator": accelerator,
            "layers": layers,
            "attention": attention,
            "expert_imbalance": expert_imbalance,
            "vocab_size": vocab_size,
            "tied": tied,
            **overrides,
        },
        settings={
            "precision": precision,
            "optimizer": optimizer,
            "accelerator": accelerator,
            "layers": layers,
            "attention": "flash" if work.flash else "unfused",
            "sequence_mode": lora.sequence_mode,
            "rank": lora.rank,
            **_told(overrides),
        },
        after_forward=round(after_forward),
        is_mixture=any(mixtures),
        expert_share=trained.of_experts / trained.parameters if trained.parameters else 0.0,
        not_counted=", ".join((*_not_modelled(work), NOT_COUNTED[accelerator])),
    )


def _not_modelled(work: Work) -> Iterator[str]:
    config = work.config
    fields = {name: getattr(config, name, None) for name in NOT_MODELLED}
    if unknown := [f"{n}={v}" for n, v in fields.items() if v and not (n.endswith("_size") and v == 1)]:
        yield f"what {', '.join(unknown)} changes"
    # Transformer Engine casts biases.
    if not work.te and work.weight != work.element and (config.add_bias_linear or config.add_qkv_bias):
        yield _PROMOTED


def _told(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in overrides.items()}


def first_trained(planned: Planned, layers: int) -> tuple[int, int]:
    """The first layer that anything trains in, and the stage in it; what comes before only runs forward.

    Args:
        planned: What is to train.
        layers: The model's.
    """
    first = (layers, 0)
    names = [site.name for site, plan in planned.sites if not isinstance(plan, str)]
    for name in [*names, *(name for name, _ in planned.saved)]:
        layer, leaf = layer_of(name), name.rpartition(".")[2]
        if layer is not None:
            first = min(first, (layer, STAGES.get(leaf, 0)))
        elif "embedding" in name:
            first = (0, 0)
    return first


def _first_source(planned: Planned, first: tuple[int, int], work: Work) -> dict[str, float]:
    """What the first adapters compute their inputs from; of others the base keeps it anyway."""
    kept: dict[str, float] = {}
    for site, plan in planned.sites:
        is_first = (layer_of(site.name), STAGES.get(site.leaf)) == first and site.leaf != "router"
        if is_first and not isinstance(plan, str) and plan.known is not None:
            if site.leaf == "linear_fc2":
                kept["mlp"] = activation_input(work, site.d_in // site.group.size())
            else:
                kept["norms"] = norm_input(work)
    return kept


class _Trained(NamedTuple):
    """Bytes of adapters, bytes of float32 masters, parameters, and those that are each expert's own, on one rank."""

    adapters: int
    masters: int
    parameters: int
    of_experts: int


def _trained(planned: Planned, lora: LoRAConfig) -> _Trained:
    held = trains = of_experts = 0
    names = trained_parameters(lora)
    for site, plan in planned.sites:
        if not isinstance(plan, str):
            sizes = {name: math.prod(plan.shape(name, site)) for name in {"a", *names}}
            held += sum(sizes.values())
            trains += sum(sizes[name] for name in names)
            of_experts += sum(sizes[name] for name in names if name in plan.each)
    element = DTYPES[lora.dtype].itemsize
    full = [p for _, module in planned.saved for p in module.parameters()]
    masters = (4 * trains if element < 4 else 0) + sum(4 * p.numel() for p in full if p.element_size() < 4)
    return _Trained(held * element, masters, trains + sum(p.numel() for p in full), of_experts)


def _costs(planned: Planned, lora: LoRAConfig, work: Work) -> dict[str, Cost]:
    """Of each site that gets an adapter; of experts with the tokens of the busiest rank."""
    costs = {}
    for site, plan in planned.sites:
        if not isinstance(plan, str):
            cost = predict(site, plan, lora, work.sizes, work.element)
            costs[site.name] = cost.scaled(work.load) if site.experts else cost
    return costs


def _again(planned: Planned, costs: Mapping[str, Cost], work: Work) -> float:
    """Bytes of adapters in the layers that are computed again at one time."""
    by_layer: dict[str, float] = {}
    for name, cost in costs.items():
        layer = ".".join(name.split(".")[:3])
        by_layer[layer] = by_layer.get(layer, 0.0) + cost.again_per_token * work.tokens
    config = work.config
    chunk = (config.recompute_num_layers or 1) if config.recompute_method == "uniform" else 1
    return chunk * max(by_layer.values(), default=0.0)


def _inputs_of_trained(planned: Planned, work: Work) -> float:
    """Bytes that linears, and norms on the CPU, keep which train in full."""
    kept = 0.0
    for module in (module for _, saved in planned.saved for module in saved.modules()):
        name, weight = type(module).__name__, getattr(module, "weight", None)
        if weight is None:
            continue
        if weight.dim() == 2 and hasattr(module, "tp_group"):
            tokens = work.tokens if name.startswith(("Row", "TERow")) else work.split
            kept += tokens * weight.shape[1] * work.element
        elif name == "Norm" and work.on_cpu:
            kept += work.split * weight.numel() * 4
    return kept
