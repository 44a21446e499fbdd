"""What is to become of each linear of a model, decided before anything is changed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_mcore_lora.adapters.config import LoRAConfig
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
from lightning_mcore_lora.adapters.matching import first_match, layer_of, matches, near_names
from lightning_mcore_lora.adapters.placement import Factor, lookup
from lightning_mcore_lora.adapters.producers import find_producer
from lightning_mcore_lora.adapters.sites import Site, find_sites, module_names


class Planned(NamedTuple):
    """What is to become of a model.

    Args:
        sites: Each target with its plan, or with the reason why it gets no adapter.
        saved: Name and module of each that is to train in full.
    """

    sites: list[tuple[Site, Plan | str]]
    saved: list[tuple[str, nn.Module]]


def plan_lora(model: nn.Module, config: LoRAConfig) -> Planned:
    """Plan the adapters of a model, which is left as it is.

    Args:
        model: See :func:`~lightning_mcore_lora.apply_lora`.
        config: The adapters' settings.

    Raises:
        ValueError: If a pattern matches nothing, or a rank does not fit.
        NotImplementedError: If a target's linear is fused into something larger, with what to set.
    """
    found = list(find_sites(model))
    targets = _targets(config, found, _without_linears(model, config))
    saved = _modules_to_save(config, model, targets)
    return Planned([(site, why_not_adapted(site) or _plan(site, config)) for site in targets], saved)


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
    check_is_called(site)
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
