"""An optimizer's state by the names of its parameters, so that it does not depend on how they are numbered here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mcore_lora.checkpoint.errors import CheckpointError
from lightning_mcore_lora.checkpoint.shards import Shards, of_any_expert


@dataclass
class OptimizerState:
    """What an optimizer holds on this rank.

    Args:
        groups: Settings of each parameter group.
        names: Local names of each group's parameters.
        like: State to local name to a tensor like the parameter, which is sharded as it is.
        numbers: Whole name to its states that are single numbers, which all ranks share; as plain numbers, since there
            is one for each parameter, and reading a thousand tensors takes longer than all moments.
        own: Whole name to its other states, of which nobody knows how they are sharded.
    """

    groups: list[dict[str, Any]]
    names: list[list[str]]
    like: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def take_apart(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], shards: Shards) -> OptimizerState:
    """The state of an optimizer whose parameters are among ``parameters``."""
    state = optimizer.state_dict()
    names = names_of(optimizer, parameters)
    flat = [name for group in names for name in group]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    result = OptimizerState(groups, names)
    for index, entry in state["state"].items():
        name = flat[index]
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameters[name].shape and value.dim():
                result.like.setdefault(key, {})[name] = value
            elif value is None or isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1):
                result.numbers.setdefault(shards.whole_name(name), {})[key] = _plain(value)
            else:
                result.own.setdefault(shards.whole_name(name), {})[key] = value
    return result


def in_common(optimizer: Optimizer, state: OptimizerState, shards: Shards) -> dict[str, Any]:
    """What this rank knows of an optimizer beside tensors, in names that all ranks share."""
    return {
        "kind": type(optimizer).__name__,
        "groups": state.groups,
        "names": _whole(state.names, shards),
        "like": sorted(state.like),
        "numbers": state.numbers,
        "own": sorted({key for entry in state.own.values() for key in entry}),
    }


def of_all_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks know together: those of an expert-parallel group have different parameters."""
    numbers = {name: entry for rank in ranks for name, entry in rank["numbers"].items()}
    union = {key: sorted({name for rank in ranks for name in rank[key]}) for key in ("like", "own")}
    return ranks[0] | union | {"numbers": numbers}


def put_together(state: OptimizerState, shards: Shards) -> dict[str, Any]:
    """A ``state_dict``, its parameters numbered as they are here."""
    entries: dict[int, dict[str, Any]] = {}
    groups = []
    index = 0
    for settings, names in zip(state.groups, state.names, strict=True):
        groups.append(settings | {"params": list(range(index, index + len(names)))})
        for name in names:
            whole = shards.whole_name(name)
            entry = {key: values[name] for key, values in state.like.items() if name in values}
            entry |= {key: _from_plain(value) for key, value in state.numbers.get(whole, {}).items()}
            entry |= state.own.get(whole, {})
            if entry:
                entries[index] = entry
            index += 1
    return {"state": entries, "param_groups": groups}


def names_of(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Local names of each parameter group."""
    by_id = {id(parameter): name for name, parameter in parameters.items()}
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def check(
    optimizer: Optimizer, names: list[list[str]], saved: dict[str, Any], shards: Shards, same_layout: bool
) -> None:
    """Check that an optimizer can go on from a state.

    Raises:
        CheckpointError: If it is another kind, has other parameters, or its state cannot be split anew.
    """
    kind, here = type(optimizer).__name__, _whole(names, shards)
    if saved["kind"] != kind:
        raise CheckpointError(
            f"its optimizer is {saved['kind']}, this run's is {kind}: use the same one, or load the weights only "
            "(load_checkpoint)"
        )
    if saved["names"] != here:
        counts = [[len(group) for group in groups] for groups in (saved["names"], here)]
        raise CheckpointError(
            f"its {kind} has parameter groups of {counts[0]} parameters, this run's of {counts[1]}, or of other names: "
            "train the same in the same groups, or load the weights only (load_checkpoint)"
        )
    if saved["own"] and not same_layout:
        raise CheckpointError(
            f"{kind} keeps {saved['own']}, which are not shaped like the parameters: nobody knows how to split them "
            "anew. Resume at the same layout, or load the weights only (load_checkpoint)"
        )


def _plain(value: Any) -> Any:
    return (value.item(), value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def _from_plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    number, dtype, shape = value
    return torch.full(shape, number, dtype=dtype)


def _whole(names: list[list[str]], shards: Shards) -> list[list[str]]:
    return [sorted({of_any_expert(shards.whole_name(name)) for name in group}) for group in names]
