"""From an :class:`~lightning_mcore_lora.peft.adapter.Adapter` to a Megatron-Core model's adapters."""

import math
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from lightning_mcore_lora.adapters import LoRAConfig, adapters
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.sites import find_sites
from lightning_mcore_lora.adapters.whole import Whole
from lightning_mcore_lora.checkpoint.errors import together
from lightning_mcore_lora.models import layouts
from lightning_mcore_lora.models.families import Weight
from lightning_mcore_lora.models.layouts import Shard
from lightning_mcore_lora.models.marks import master_of
from lightning_mcore_lora.parallel import shard_group
from lightning_mcore_lora.peft.adapter import Adapter, Update
from lightning_mcore_lora.peft.model import base_parameters
from lightning_mcore_lora.peft.names import Names, Target, module_of


def settings_for(model: nn.Module, adapter: Adapter, names: Names) -> LoRAConfig:
    """Settings with which the model's linears can hold an adapter.

    Raises:
        ValueError: If linears that are fused in one differ in rank or scale.
    """
    wanted: dict[str, list[Update]] = {}
    for name, update in adapter.updates.items():
        wanted.setdefault(names.by_parameter[name].site, []).append(update)
    for site, updates in wanted.items():
        facts = sorted({(update.rank, update.alpha) for update in updates})
        if len(facts) > 1:
            raise ValueError(
                f"{site} holds linears whose (rank, alpha) differ, {facts}, and has one of each: use the adapter with "
                "`lightning-mcore-lora merge`"
            )
    ranks = {site: updates[0].rank for site, updates in wanted.items()}
    alphas = {site: updates[0].alpha for site, updates in wanted.items()}
    rank, alpha = (max(set(values.values()), key=list(values.values()).count) for values in (ranks, alphas))
    sites = [site.name for site in find_sites(model)]
    apart = [site for site in wanted if why_apart(names.targets[site], adapter)]
    in_full = [name for name, weight in names.trained().items() if adapter.modules.keys() & set(weight.parameters)]
    return LoRAConfig(
        rank=int(rank),
        alpha=alpha,
        target_modules=_patterns(list(wanted), sites),
        rank_pattern={site: value for site, value in ranks.items() if value != rank},
        alpha_pattern={site: value for site, value in alphas.items() if value != alpha},
        dropout=adapter.dropout,
        rslora=adapter.rslora,
        dora=adapter.dora,
        canonical=_patterns(apart, sites) if apart else False,
        modules_to_save=tuple(dict.fromkeys(module_of(name) for name in in_full if name in base_parameters(model))),
    )


def _patterns(wanted: list[str], sites: list[str]) -> tuple[str, ...]:
    """Short patterns that name these sites and no other."""
    patterns: dict[str, None] = {}
    for site in wanted:
        ends = (".".join(site.split(".")[-2:]), site)
        fits = (end for end in ends if all(other in wanted for other in sites if other.endswith(f".{end}")))
        patterns[next(fits, site)] = None
    return tuple(patterns)


def why_apart(target: Target, adapter: Adapter) -> str | None:
    """Why the linears that are fused in one need factors of their own, or ``None``."""
    given = {name: adapter.updates[name] for name in target.parameters if name in adapter.updates}
    first = next(iter(given), "")
    for name in target.parameters:
        if name not in given:
            return f"{first} has an adapter and {name} has none"
        if not torch.equal(given[first].a, given[name].a):
            return f"{first} and {name} have different A"
    return None


@torch.no_grad()
def put(adapter: Adapter, model: nn.Module, names: Names) -> None:
    """Set the model's adapters, and what trains beside them.

    Raises:
        ValueError: If an adapter does not fit, naming the site; the model is then left as it was.
    """
    found = {a.site.name: a for _, a in adapters(model)}
    missing = sorted({names.by_parameter[name].site for name in adapter.updates} - set(found))
    if missing:
        raise ValueError(f"the model has no adapter at {missing[:4]}: name them in target_modules")
    for held in found.values():
        held.check_works()
    values = {site: _whole(held, names.targets[site], adapter, names) for site, held in found.items()}
    parameters = base_parameters(model)
    modules = _cut_modules(adapter.modules, parameters, names)
    others = [name for name, parameter in parameters.items() if parameter.requires_grad and name not in modules]
    if others:
        raise ValueError(f"{others[:4]} train in full here, and the adapter has nothing for them: leave them frozen")
    with together("the adapter is for another base"):
        for name, value in _cut_modules(adapter.copies, parameters, names).items():
            if not torch.equal(value.to(parameters[name].dtype), parameters[name].cpu()):
                raise ValueError(f"{name} was changed before it was trained: save that base, and load it here")
    for site, whole in values.items():
        found[site].load_full(*whole)
        for parameter in found[site].parameters():
            master_of(parameter).copy_(parameter)
    for name, value in modules.items():
        parameters[name].requires_grad_(True).copy_(value)
        master_of(parameters[name]).copy_(value)


def _whole(held: LoRAAdapter, target: Target, adapter: Adapter, names: Names) -> Whole:
    """The whole factors of a site; what the adapter says nothing of is zero, and stays so in training."""
    site, plan = held.site, held.plan
    updates = [adapter.updates.get(name) for name in target.parameters]
    given = [update for update in updates if update is not None]
    if not given:
        raise ValueError(f"the adapter says nothing of {site.name}: leave it out of target_modules")
    scale = given[0].scale(adapter.rslora)
    for update in given:
        if update.rank != plan.rank or not math.isclose(update.scale(adapter.rslora), plan.scale):
            raise ValueError(
                f"{site.name} has rank={plan.rank} and scale={plan.scale:g}, the adapter rank={update.rank} and "
                f"scale={scale:g}: set rank and alpha, or load it into a model without adapters"
            )
    if bool(adapter.dora) != (held.magnitude is not None):
        raise ValueError(f"the adapter has dora={adapter.dora}: set it in LoRAConfig too")
    whole = _of_experts(held, given[0], target) if target.is_expert else _of_parts(held, adapter, target, names)
    for name, value, shape in zip(("A", "B", "magnitude"), whole, _shapes(held), strict=True):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} of {site.name} is {shape}, the adapter's is {tuple(value.shape)}: another model?")
    return whole


def _shapes(held: LoRAAdapter) -> tuple[tuple[int, ...], ...]:
    site, plan = held.site, held.plan
    shapes = {"a": (plan.width, site.d_in), "b": (site.d_out, plan.rank), "magnitude": (site.d_out,)}
    experts = site.experts * parallel_state.get_expert_model_parallel_world_size() if site.experts else 0
    return tuple((experts, *shape) if name in plan.each else shape for name, shape in shapes.items())


def _of_parts(held: LoRAAdapter, adapter: Adapter, target: Target, names: Names) -> Whole:
    updates = [adapter.updates.get(name) for name in target.parameters]
    given = next(update for update in updates if update is not None)
    if len(updates) == 1:
        magnitude = given.magnitude
        if magnitude is not None:
            magnitude = _with_padding(magnitude, target.weight, held.site.d_out)
        return Whole(given.a, _with_padding(given.b, target.weight, held.site.d_out), magnitude)
    reason = why_apart(target, adapter)
    apart = len(held.plan.parts) > 1
    if reason and not apart:
        raise ValueError(
            f"{reason}, and both are in {held.site.name}, whose adapter has one A: give them factors of their own with "
            "LoRAConfig(canonical=True), or load into a model without adapters, which gets such"
        )
    if held.magnitude is not None and None in updates:
        raise ValueError(f"{reason}: DoRA would train the magnitude of both. Use `lightning-mcore-lora merge`")
    split = target.weight.layout.split
    assert split is not None
    empty = split(torch.empty(held.site.d_out, device="meta"), names.heads)
    nothing = [Update(torch.zeros_like(given.a), torch.zeros(len(rows), given.rank), given.alpha) for rows in empty]
    filled = [update or none for update, none in zip(updates, nothing, strict=True)]

    def joined(values: list[Any]) -> Tensor:
        return target.weight.layout.cut(values, Shard(0, 1, names.heads.groups))

    a = torch.cat([update.a for update in filled]) if apart else given.a
    magnitude = None if held.magnitude is None else joined([update.magnitude for update in filled])
    return Whole(a, joined([update.b for update in filled]), magnitude)


def _of_experts(held: LoRAAdapter, update: Update, target: Target) -> Whole:
    a, b, magnitude = update.a, update.b, update.magnitude
    if target.weight.layout.interleaved:
        b = _in_halves(b, -2)
        magnitude = None if magnitude is None else _in_halves(magnitude, -1)
    if len(held.plan.parts) > 1:
        raise ValueError(
            f"{held.site.name}: gate and up of experts have one A in PEFT; name other linears in LoRAConfig.canonical, "
            "for example ('linear_qkv',)"
        )
    values = []
    for name, value in (("a", a), ("b", b)):
        if name not in held.plan.each:
            if not torch.equal(value, value[:1].expand_as(value)):
                raise ValueError(
                    f"{held.site.name}: experts differ in {name.upper()}, which expert_adapters="
                    f"{held.config.expert_adapters!r} shares: use 'per_expert'"
                )
            value = value[0]
        values.append(value)
    return Whole(values[0], values[1], magnitude)


def _cut_modules(modules: dict[str, Tensor], parameters: dict[str, nn.Parameter], names: Names) -> dict[str, Tensor]:
    """This rank's parts of parameters that were trained in full."""
    rest, found = dict(modules), {}
    for name, weight in names.trained().items():
        hf = weight.parameters
        if name not in parameters or not any(tensor in rest for tensor in hf):
            continue
        if not all(tensor in rest for tensor in hf):
            raise ValueError(f"{hf} are one parameter here, {name}, and the adapter has only some of them in full")
        if weight.layout is layouts.vocabulary and rest[hf[0]].shape[0] != names.hf.vocab_size:
            raise ValueError(f"{hf[0]} of the adapter has {rest[hf[0]].shape[0]} rows, the model {names.hf.vocab_size}")
        group = shard_group(parameters[name])
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        shard = Shard(rank, size, names.heads.groups, rows=parameters[name].shape[0])
        found[name] = weight.layout.cut([rest.pop(tensor) for tensor in hf], shard)
        if found[name].shape != parameters[name].shape:
            raise ValueError(f"{hf} of the adapter do not fit {name}: another model?")
    if rest:
        raise ValueError(f"the adapter holds {sorted(rest)[:4]} in full, for which the model has no parameter")
    return found


def _with_padding(rows: Tensor, weight: Weight, count: int) -> Tensor:
    missing = count - rows.shape[0] if weight.layout is layouts.vocabulary else 0
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing > 0 else rows


def _in_halves(value: Tensor, dim: int) -> Tensor:
    """Gate and up in turns to gate and up in halves."""
    return torch.cat(value.unflatten(dim, (-1, 2)).unbind(dim), dim)
