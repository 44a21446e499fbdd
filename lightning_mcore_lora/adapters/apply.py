"""Put adapters into a model, and take them out."""

import difflib
import functools
import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor, nn

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.eligibility import choose_mode, why_not_adapted
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.placement import Factor, lookup
from lightning_mcore_lora.adapters.report import LoRAReport, SiteReport
from lightning_mcore_lora.adapters.sites import Site, find_sites

log = logging.getLogger(__name__)


def apply_lora(model: nn.Module, config: LoRAConfig) -> LoRAReport:
    """Freeze a model and put an adapter beside each targeted linear.

    The linears stay where they are, with their names and state-dict keys; each gains a submodule ``lora`` with the
    factors ``a`` and ``b``. Works on any module tree that holds Megatron-Core's parallel linears.

    Args:
        model: The model, or a module that holds it. Megatron-Core's groups must exist.
        config: The adapters' settings.

    Returns:
        What became of each target.

    Raises:
        ValueError: If there is nothing to adapt, a rank does not fit, or the model has adapters already; the model is
            then left as it was.
    """
    if next(adapters(model), None):
        raise ValueError("the model has LoRA adapters already: apply_lora once, or remove_lora(model) first")
    found = list(find_sites(model))
    targets = [site for site in found if site.leaf in config.target_modules]
    _check_targets(config, found)
    base_parameters = _logical_parameters(model)
    entries: list[SiteReport] = []
    built: list[tuple[Site, LoRAAdapter]] = []
    for site in targets:
        reason = why_not_adapted(site)
        if reason:
            entries.append(SiteReport(site.name, reason=reason))
            continue
        adapter, fallback = _build(site, config)
        built.append((site, adapter))
        entries.append(
            SiteReport(
                site.name,
                adapter.placement.name,
                adapter.placement.mode,
                fallback,
                parameters=config.rank * (site.d_in + site.d_out),
            )
        )
    report = LoRAReport(tuple(entries), base_parameters)
    if not built:
        raise ValueError(f"none of the targeted linears can be adapted:\n{report}")
    model.requires_grad_(False)
    for site, adapter in built:
        _attach(site.linear, adapter)
    _let_recompute_reach_adapters(model)
    if report.fallbacks and _is_rank_zero():
        reasons = {site.reason for site in report.fallbacks}
        log.warning(
            "LoRA: %d of %d sites do not run sequence_mode=%r but %s: %s",
            len(report.fallbacks),
            len(built),
            config.sequence_mode,
            sorted({site.mode for site in report.fallbacks if site.mode}),
            "; ".join(sorted(filter(None, reasons))),
        )
    return report


def remove_lora(model: nn.Module) -> None:
    """Take every adapter out of a model. Parameters stay frozen.

    Args:
        model: A model after :func:`apply_lora`.
    """
    for name, adapter in list(adapters(model)):
        linear = adapter.site.linear
        del linear.forward, linear.lora
        log.debug("removed adapter %s", name)


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRAAdapter]]:
    """Every adapter of a model with its path."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRAAdapter))


def _attach(linear: nn.Module, adapter: LoRAAdapter) -> None:
    adapter.train(linear.training)
    linear.lora = adapter
    linear.forward = MethodType(_forward_with_lora, linear)


def _forward_with_lora(linear: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return linear.lora(functools.partial(type(linear).forward, linear), x, *args, **kwargs)


def _let_recompute_reach_adapters(model: nn.Module) -> None:
    """Activation checkpoints pass gradients only to inputs that ask for them, and a frozen embedding's do not."""
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding) and module.config.recompute_granularity:
            module.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _build(site: Site, config: LoRAConfig) -> tuple[LoRAAdapter, str | None]:
    mode, fallback = choose_mode(site, config)
    placement = lookup(site.kind, site.sequence_parallel, mode)
    eager = lookup(site.kind, site.sequence_parallel, "gather" if mode == "regather" else mode)
    if placement.a is Factor.RANK and config.rank % site.group.size():
        raise ValueError(
            f"rank={config.rank} is not divisible by tensor_parallel_size={site.group.size()}, which "
            f"sequence_mode={mode!r} needs at {site.name}: choose a multiple, or sequence_mode='local', which takes any"
        )
    return (
        LoRAAdapter(site, placement, eager, rank=config.rank, scale=config.scale, seed=config.seed),
        fallback,
    )


def _check_targets(config: LoRAConfig, found: list[Site]) -> None:
    names = sorted({site.leaf for site in found})
    if not names:
        raise ValueError(
            "the model holds none of Megatron-Core's parallel linears: build it before the adapters are applied, "
            "in LightningModule.configure_model"
        )
    for target in config.target_modules:
        if target not in names:
            near = difflib.get_close_matches(target, names, n=3) or names
            raise ValueError(f"target_modules: {target!r} matches no linear of the model; near names: {near}")


def _logical_parameters(model: nn.Module) -> int:
    """Parameters over all ranks, each counted once."""
    total = 0
    for parameter in model.parameters():
        sharded = getattr(parameter, "tensor_model_parallel", False)
        if not getattr(parameter, "allreduce", True):
            size = parallel_state.get_expert_model_parallel_world_size()
            size *= parallel_state.get_expert_tensor_parallel_world_size() if sharded else 1
        else:
            size = parallel_state.get_tensor_model_parallel_world_size() if sharded else 1
        total += parameter.numel() * size
    return total


def _is_rank_zero() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
