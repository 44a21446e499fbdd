"""From a Megatron-Core model's adapters to an :class:`~lightning_mcore_lora.peft.adapter.Adapter`."""

import torch
from torch import Tensor, nn

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.whole import Whole, whole_factors, whole_parameter
from lightning_mcore_lora.models import layouts
from lightning_mcore_lora.models.families import Weight
from lightning_mcore_lora.models.marks import mark_parameters
from lightning_mcore_lora.parallel import shard_group
from lightning_mcore_lora.peft.adapter import Adapter, Update
from lightning_mcore_lora.peft.model import base_parameters
from lightning_mcore_lora.peft.names import Names, Target


def adapter_of(model: nn.Module, names: Names, keep: bool = True) -> Adapter:
    """What the model's adapters add to a transformers model, on the CPU.

    A collective over all processes.

    Args:
        model: The model.
        names: Its names.
        keep: Whether this rank is to get it; the others hold one linear's factors at a time.

    Raises:
        ValueError: If the model has no adapters, or one sits where the transformers model has no linear.
    """
    found = [adapter for _, adapter in adapters(model)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no LoRA adapters")
    unknown = [adapter.site.name for adapter in found if adapter.site.name not in names.targets]
    if unknown:
        raise ValueError(f"{unknown[:4]} have no counterpart in a {names.hf.settings['model_type']} of transformers")
    modules = _trained_modules(model, names, keep)
    config = found[0].config
    updates: dict[str, Update] = {}
    for adapter in found:
        target = names.targets[adapter.site.name]
        whole = whole_factors(adapter)
        if keep:
            updates |= (_expert_update if target.is_expert else _updates)(adapter, whole.cpu(), target, names)
    return Adapter(updates, config.rslora, config.dora, config.dropout, modules)


def _updates(adapter: LoRAAdapter, whole: Whole, target: Target, names: Names) -> dict[str, Update]:
    """Each linear that is fused in one."""
    plan, split = adapter.plan, target.weight.layout.split
    assert split is not None
    b = split(_without_padding(whole.b, target.weight, names), names.heads)
    count = len(b)
    a = whole.a.chunk(count) if len(plan.parts) > 1 else [whole.a] * count
    magnitude: list[Tensor | None] = [None] * count
    if whole.magnitude is not None:
        magnitude = [*split(_without_padding(whole.magnitude, target.weight, names), names.heads)]
    found = zip(target.parameters, a, b, magnitude, strict=True)
    updates = {name: Update(a, b, plan.alpha, magnitude) for name, a, b, magnitude in found}
    # What a canonical adapter does not train at all is no target of PEFT's.
    idle = len(plan.parts) > 1 and adapter.magnitude is None
    return {name: update for name, update in updates.items() if not (idle and update.is_nothing())}


def _expert_update(adapter: LoRAAdapter, whole: Whole, target: Target, names: Names) -> dict[str, Update]:
    """All experts in one, as transformers holds their weights."""
    plan = adapter.plan
    b, alpha = whole.b, plan.alpha
    if len(plan.parts) > 1:  # gate and up have factors of their own: in one parameter they are blocks
        gate, up = b.chunk(2, dim=-2)
        b = torch.cat([torch.cat([gate, torch.zeros_like(gate)], -1), torch.cat([torch.zeros_like(up), up], -1)], -2)
        alpha *= 2**0.5 if adapter.config.rslora else 2
    magnitude = whole.magnitude
    if target.weight.layout.interleaved:
        b = _interleaved(b, -2)
        magnitude = None if magnitude is None else _interleaved(magnitude, -1)
    return {target.parameters[0]: Update(whole.a, b, alpha, magnitude)}


def _interleaved(value: Tensor, dim: int) -> Tensor:
    """Gate and up in halves to gate and up in turns."""
    dim %= value.dim()
    return torch.stack(value.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def _trained_modules(model: nn.Module, names: Names, keep: bool) -> dict[str, Tensor]:
    """Parameters beside the adapters that train, in transformers' names."""
    mark_parameters(model)
    rows = names.trained()
    found: dict[str, Tensor] = {}
    for name, parameter in base_parameters(model).items():
        if not parameter.requires_grad:
            continue
        weight = rows.get(name)
        if weight is None or weight.layout.split is None:
            raise ValueError(
                f"{name} was trained in full, which has no place in an adapter: it stays in the training checkpoint. "
                "Leave it out of modules_to_save to export or merge"
            )
        group = shard_group(parameter)
        whole = parameter.detach() if group is None else whole_parameter(parameter, group)
        if keep:
            parts = weight.layout.split(_without_padding(whole.cpu(), weight, names), names.heads)
            found |= dict(zip(weight.parameters, parts, strict=True))
    return found


def _without_padding(rows: Tensor, weight: Weight, names: Names) -> Tensor:
    return rows[: names.hf.vocab_size] if weight.layout is layouts.vocabulary else rows
