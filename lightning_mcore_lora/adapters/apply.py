"""Put adapters into a model, and take them out."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor, nn

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.cost import predict
from lightning_mcore_lora.adapters.eligibility import (
    WITHOUT_LINEARS,
    check_dropout,
    check_is_called,
    choose_mode,
    what_is_lost,
    why_not_adapted,
    why_not_recomputed,
)
from lightning_mcore_lora.adapters.experts import factors_of_each
from lightning_mcore_lora.adapters.factors import Plan
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.matching import first_match, layer_of, matches, near_names
from lightning_mcore_lora.adapters.placement import Factor, lookup
from lightning_mcore_lora.adapters.producers import find_producer
from lightning_mcore_lora.adapters.report import TRAINED, LoRAReport, SiteReport
from lightning_mcore_lora.adapters.sequential import SequentialAdapter
from lightning_mcore_lora.adapters.sites import Site, find_sites, module_names
from lightning_mcore_lora.parallel import shard_group

log = logging.getLogger(__name__)


def apply_lora(model: nn.Module, config: LoRAConfig) -> LoRAReport:
    """Freeze a model and put an adapter beside each targeted linear.

    The linears stay where they are, with their names and state-dict keys; each gains a submodule ``lora`` with the
    factors ``a`` and ``b``. Works on any module tree that holds Megatron-Core's parallel linears. Base weights are to
    be loaded before, if ``dora`` is on: the magnitudes begin as their row norms.

    Args:
        model: The model, or a module that holds it. Megatron-Core's groups must exist.
        config: The adapters' settings.

    Returns:
        What became of each target.

    Raises:
        ValueError: If there is nothing to adapt, a pattern matches nothing, a rank does not fit, or the model has
            adapters already; the model is then left as it was.
        NotImplementedError: If a target's linear is fused into something larger, with what to set; in the same way.
    """
    if next(adapters(model), None):
        raise ValueError("the model has LoRA adapters already: apply_lora once, or remove_lora(model) first")
    found = list(find_sites(model))
    merged = _without_linears(model, config)
    targets = _targets(config, found, merged)
    saved = _modules_to_save(config, model, targets)
    base_parameters = logical_parameters(model.parameters())
    entries: list[SiteReport] = []
    built: list[LoRAAdapter] = []
    for site in targets:
        reason = why_not_adapted(site)
        if reason:
            entries.append(SiteReport(site.name, site.kind, reason=reason))
            continue
        check_is_called(site)
        plan = _plan(site, config)
        adapter = (SequentialAdapter if site.sequential else LoRAAdapter)(site, plan, config)
        built.append(adapter)
        entries.append(
            SiteReport(
                site.name,
                site.kind,
                plan.placement.name,
                plan.placement.mode,
                plan.fallback,
                plan.rank,
                logical_parameters(p for p in adapter.parameters() if p.requires_grad),
                predict(adapter, config),
            )
        )
    for name, module in saved:
        entries.append(SiteReport(name, mode=TRAINED, parameters=logical_parameters(module.parameters())))
    report = LoRAReport(tuple(entries), base_parameters)
    if not built:
        raise ValueError(f"none of the targeted linears can be adapted:\n{report}")
    model.requires_grad_(False)
    for adapter in built:
        adapter.attach()
    for _, module in saved:
        module.requires_grad_(True)
    _let_recompute_reach_adapters(model)
    _warn_of_fallbacks(report, len(built))
    return report


def remove_lora(model: nn.Module) -> None:
    """Take every adapter out of a model. Its other parameters stay frozen, or in training, as they are.

    Args:
        model: A model after :func:`apply_lora`.
    """
    for _, adapter in list(adapters(model)):
        adapter.detach()
    for module in model.modules():
        handle = vars(module).pop("_lora_handle", None)
        if handle is not None:
            handle.remove()


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRAAdapter]]:
    """Every adapter of a model with its path."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRAAdapter))


def check_gradients(model: nn.Module) -> None:
    """Check, after a backward, that it reached every adapter; the strategy does so by itself after the first step.

    Args:
        model: A model after a forward in training and its backward.

    Raises:
        RuntimeError: If an adapter that trains got no gradient, naming its site.
    """
    raise_unreached(a.site.name for _, a in adapters(model) if a.b.requires_grad and a.b.grad is None)


def raise_unreached(names: Iterable[str]) -> None:
    """Raise if any adapter got no gradient."""
    names = list(names)
    if names:
        raise RuntimeError(
            f"{len(names)} adapter(s) got no gradient in the backward: {names[:4]}. Their linears did not run, or ran "
            "inside an activation checkpoint none of whose inputs requires a gradient. Leave them out of "
            "target_modules, or have the first hidden states require one"
        )


def logical_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """Number of parameters over all ranks, each counted once."""
    groups = ((parameter, shard_group(parameter)) for parameter in parameters)
    return sum(parameter.numel() * (1 if group is None else group.size()) for parameter, group in groups)


# -- targets -------------------------------------------------------------------------------------------------------


def _targets(config: LoRAConfig, found: list[Site], merged: list[str]) -> list[Site]:
    if not found:
        raise ValueError(
            "the model holds none of Megatron-Core's parallel linears: build it before the adapters are applied, "
            "in LightningModule.configure_model"
        )
    names = [site.name for site in found]
    for setting, pattern in config.patterns():
        if setting != "modules_to_save" and not any(matches(pattern, name) for name in (*names, *merged)):
            near = near_names(pattern, names)
            raise ValueError(f"{setting}: {pattern!r} matches no linear of the model; near names: {near}")
    layers = {layer for name in names if (layer := layer_of(name)) is not None}
    unknown = sorted(set(config.layers_to_transform or ()) - layers)
    if unknown:
        raise ValueError(f"layers_to_transform: the model has no layer {unknown}; it has {sorted(layers)}")
    targets = [site for site in found if _is_target(site.name, config)]
    if not targets:
        raise ValueError(
            f"exclude_modules={config.exclude_modules} and layers_to_transform={config.layers_to_transform} leave none "
            f"of target_modules={config.target_modules}"
        )
    for setting, pattern in config.patterns():
        if setting.endswith("_pattern") and not any(matches(pattern, site.name) for site in targets):
            raise ValueError(f"{setting}: {pattern!r} matches none of the linears that target_modules names")
    return targets


def _without_linears(model: nn.Module, config: LoRAConfig) -> list[str]:
    """Names that linears would have whose weights are merged into one, none of them a target.

    Raises:
        NotImplementedError: If one is.
    """
    modules = dict(model.named_modules())
    names = []
    for path, name in module_names(model).items():
        reason = WITHOUT_LINEARS.get(f"{type(modules[path]).__module__}.{type(modules[path]).__qualname__}")
        here = [f"{name}.{linear}" for linear in ("linear_fc1", "linear_fc2")] if reason else []
        if any(_is_target(linear, config) for linear in here):
            raise NotImplementedError(f"{name}: {reason}; or add '{name.rpartition('.')[2]}.*' to exclude_modules")
        names += here
    return names


def _is_target(name: str, config: LoRAConfig) -> bool:
    if first_match(config.target_modules, name) is None or first_match(config.exclude_modules, name) is not None:
        return False
    return config.layers_to_transform is None or layer_of(name) in config.layers_to_transform


def _modules_to_save(config: LoRAConfig, model: nn.Module, targets: list[Site]) -> list[tuple[str, nn.Module]]:
    """Name and module of each that is to train in full; what lies inside another is left to that one."""
    names = module_names(model)
    modules = dict(model.named_modules())
    saved: set[str] = set()
    for pattern in config.modules_to_save:
        hits = [path for path, name in names.items() if matches(pattern, name)]
        if not hits:
            near = near_names(pattern, filter(None, names.values()))
            raise ValueError(f"modules_to_save: {pattern!r} matches no module of the model; near names: {near}")
        hits = [path for path in hits if next(modules[path].parameters(), None) is not None]
        if not hits:
            raise ValueError(
                f"modules_to_save: what {pattern!r} matches has no parameters of its own. A tied output layer is the "
                "embedding: name 'word_embeddings'. A norm may be fused into its linear, as Transformer Engine's are"
            )
        saved |= set(hits)
    outer = [path for path in names if path in saved and not any(path.startswith(f"{other}.") for other in saved)]
    inside = {id(module) for path in outer for module in modules[path].modules()}
    both = [site.name for site in targets if any(id(linear) in inside for linear in site.linears)]
    if both:
        raise ValueError(f"{both[:4]} are in target_modules and in modules_to_save: choose one, or use exclude_modules")
    return [(names[path], modules[path]) for path in outer]


# -- one site ------------------------------------------------------------------------------------------------------


def _plan(site: Site, config: LoRAConfig) -> Plan:
    mode, fallback = choose_mode(site, config)
    placement = lookup(site.kind, site.around, mode)
    eager = lookup(site.kind, site.around, "gather" if mode == "regather" else mode)
    rank = _by_pattern(config.rank_pattern, site.name, None) or _default_rank(site, config)
    alpha = _by_pattern(config.alpha_pattern, site.name, config.alpha)
    given = config.canonical
    canonical = given if isinstance(given, bool) else first_match(given, site.name) is not None
    parts = tuple(part.name for part in site.parts()) if canonical else ()
    if canonical and site.leaf == "linear_qkv" and not parts:
        fallback = fallback or "canonical: its rows are not those of q, k and v alone, so they share one A"
    scale = alpha / (rank**0.5 if config.rslora else rank)
    each = factors_of_each(site, config.expert_adapters, config.dora)
    plan = Plan(placement, eager, rank, alpha, scale, parts or ("",), each, fallback=fallback)
    if placement.a is Factor.RANK and plan.width % site.group.size():
        raise ValueError(
            f"rank={rank} is not divisible by tensor_parallel_size={site.group.size()}, which "
            f"sequence_mode={mode!r} needs at {site.name}: choose a multiple, or sequence_mode='local', which takes any"
        )
    if config.dropout:
        check_dropout(site)
    if config.dora and not site.has_weights:
        raise ValueError(
            f"dora=True needs a weight at {site.name}, which has none of its own (it is tied to the embedding, or in "
            "one with other experts' by moe_single_grouped_weight): exclude it"
        )
    if config.recompute_inputs and not config.freeze_a:
        reason = why_not_recomputed(site, mode)
        known = find_producer(site) if reason is None else None
        plan = dataclasses.replace(plan, known=known, fallback=fallback or reason)
    return dataclasses.replace(plan, fallback=plan.fallback or what_is_lost(site))


def _default_rank(site: Site, config: LoRAConfig) -> int:
    """The rank of a site that no pattern names."""
    if not (site.experts and config.normalize_expert_rank):
        return config.rank
    rank, rest = divmod(config.rank, site.config.moe_router_topk)
    if rest or not rank:
        raise ValueError(
            f"normalize_expert_rank: rank={config.rank} is not divisible by moe_router_topk="
            f"{site.config.moe_router_topk} at {site.name}: choose a multiple, or give experts a rank by rank_pattern"
        )
    return rank


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    pattern = first_match(patterns, name)
    return default if pattern is None else patterns[pattern]


# -- around the model ----------------------------------------------------------------------------------------------


def _let_recompute_reach_adapters(model: nn.Module) -> None:
    """Activation checkpoints pass gradients only to inputs that ask for them, and a frozen embedding's do not."""
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding) and module.config.recompute_granularity:
            module._lora_handle = module.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _warn_of_fallbacks(report: LoRAReport, adapted: int) -> None:
    if not report.fallbacks or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
        return
    reasons = sorted({site.reason or "" for site in report.fallbacks})
    modes = sorted({site.mode or "" for site in report.fallbacks})
    log.warning(
        "LoRA: %d of %d sites do not run as asked but in mode %s: %s",
        len(report.fallbacks),
        adapted,
        ", ".join(modes),
        "; ".join(reasons),
    )
