"""Adapters beside the experts of one layer: exact in float64 for any number of tokens, in every layout."""

import dataclasses
from typing import Any

import pytest

from lightning_mcore_lora.adapters import dora
from lightning_mcore_lora.adapters.placement import Middle, lookup
from tests.breakages import norms_of_this_rank_only
from tests.expert_runs import cost, errors
from tests.workers import WorkerError, WorkerPool

BOUND = 1e-11
#: Zero, odd, one; all on one expert; equal, as with padding to capacity; none at all.
SIZES = {"any": (5, 0, 7, 1), "one": (0, 0, 0, 9), "equal": (3, 3, 3, 3), "none": (0, 0, 0, 0)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.4},
    "dora": {"dora": True},
    "canonical": {"canonical": True, "dora": True, "dropout": 0.2},
    "shared": {"expert_adapters": "shared", "dora": True},
    "shared outer": {"expert_adapters": "shared_outer", "dropout": 0.2},
}
LAYOUTS = [(1, (1, 1, 1)), (2, (2, 1, 2)), (2, (1, 1, 2)), (2, (2, 2, 1)), (4, (2, 2, 2))]


def all_errors(layout: tuple[int, int, int], grouped: bool) -> dict[str, float]:
    return {
        f"{option}, {tokens}: {name}": error
        for option, lora in OPTIONS.items()
        for tokens, sizes in SIZES.items()
        for name, error in errors(layout, grouped, sizes, lora).items()
    }


@pytest.mark.parametrize(
    ("grouped", "world", "layout"),
    [
        pytest.param(grouped, world, layout, marks=pytest.mark.full if grouped and world == 2 else ())
        for grouped in (False, True)
        for world, layout in LAYOUTS
    ],
)
def test_exact(workers: WorkerPool, grouped: bool, world: int, layout: tuple[int, int, int]) -> None:
    for rank in workers(world, all_errors, layout, grouped):
        assert not {name: error for name, error in rank.items() if not error < BOUND}


def _mutated(mutation: str, layout: tuple[int, int, int], lora: dict[str, Any]) -> dict[str, float]:
    from lightning_mcore_lora.adapters import factors, layer, planning

    with pytest.MonkeyPatch.context() as patch:
        row: Any = {
            "fc2's delta counted on every peer": {"middle": Middle.REDUCE},
            "A's sum left out": {"sum_a": False},
            "B's sum left out": {"sum_b": False},
        }.get(mutation)
        if row is not None:
            patch.setattr(planning, "lookup", lambda *key: dataclasses.replace(lookup(*key), **row))
        elif mutation == "output detached":
            up = layer.up
            patch.setattr(layer, "up", lambda output, z, *rest: up(output, z.detach(), *rest))
        elif mutation == "shared factors not summed":
            patch.setattr(factors, "shared_group", lambda group: group)
        elif mutation == "norms of this rank's features only":
            patch.setattr(dora.RowNorms, "__init__", norms_of_this_rank_only(dora.RowNorms.__init__))
        elif mutation == "streams not shared":
            patch.setattr(layer, "stream_to_share", lambda site: None)
        elif mutation == "one mask for all experts":
            patch.setattr(layer.Dropout, "draw", lambda *_: layer.Dropout(0.4, 1))
        return errors(layout, False, SIZES["any"], lora)


@pytest.mark.parametrize(
    ("mutation", "layout", "lora"),
    [
        ("fc2's delta counted on every peer", (2, 1, 2), {}),
        ("A's sum left out", (2, 1, 2), {}),
        ("B's sum left out", (2, 1, 2), {}),
        ("output detached", (2, 1, 2), {}),
        ("shared factors not summed", (2, 2, 1), {"expert_adapters": "shared"}),
        ("shared factors not summed", (2, 2, 1), {"expert_adapters": "shared_outer"}),
        ("norms of this rank's features only", (2, 1, 2), {"dora": True}),
    ],
    ids=str,
)
def test_mistake_is_caught(
    workers: WorkerPool, mutation: str, layout: tuple[int, int, int], lora: dict[str, Any]
) -> None:
    try:
        ranks = workers(2, _mutated, mutation, layout, lora)
    except WorkerError as error:
        assert mutation == "output detached" and "not connected" in str(error)  # noqa: PT017, PT018
        return
    assert max(error for rank in ranks for error in rank.values()) > 1e-3


@pytest.mark.parametrize(
    ("mutation", "layout"), [("streams not shared", (1, 1, 2)), ("one mask for all experts", (2, 1, 2))], ids=str
)
def test_wrong_masks_are_caught(workers: WorkerPool, mutation: str, layout: tuple[int, int, int]) -> None:
    with pytest.raises(WorkerError, match="AssertionError"):
        workers(2, _mutated, mutation, layout, {"dropout": 0.4})


# -- cost ----------------------------------------------------------------------------------------------------------


def _costs(layout: tuple[int, int, int], grouped: bool) -> dict[str, dict[str, int]]:
    options = {"plain": {}, "dropout": {"dropout": 0.4}, "dora": {"dora": True}, "A frozen": {"freeze_a": True}}
    options |= {name: {"expert_adapters": name} for name in ("shared", "shared_outer")}
    return {name: cost(layout, grouped, lora) for name, lora in options.items()}


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
@pytest.mark.parametrize(("world", "layout"), [(2, (2, 1, 2)), pytest.param(4, (2, 2, 2), marks=pytest.mark.full)])
def test_no_activation_is_sent_and_predictions_hold(
    workers: WorkerPool, world: int, layout: tuple[int, int, int], grouped: bool
) -> None:
    for rank in workers(world, _costs, layout, grouped):
        for name, counted in rank.items():
            norms = 1 if name == "dora" else 0  # of weights, all experts' in one, where d_in is sharded
            assert counted["collectives"] == norms, name
            assert counted["kept"] == counted["predicted kept"], name
            assert counted["sent"] == counted["predicted sent"], name
            assert counted["sent per step"] == counted["predicted per step"], name
