"""One adapter beside one linear: exact in float64, at the cost that the placement table says."""

from typing import Any

import pytest
import torch

from lightning_mcore_lora.adapters.placement import TABLE, Around, Enter, Middle, Sees, lookup
from tests import site_runs
from tests.breakages import breakages, errors_when_broken
from tests.site_runs import BATCH, D_IN, RANK, SEQUENCE, cost, errors
from tests.workers import WorkerError, WorkerPool

BOUND = 1e-12
MODES = ("gather", "regather", "local")
SP, WHOLE, REMOVED = Around.SEQUENCE, Around.WHOLE, Around.REMOVED
LAYOUTS = [
    (1, WHOLE),
    (2, WHOLE),
    pytest.param(2, SP, marks=pytest.mark.full),
    pytest.param(3, WHOLE, marks=pytest.mark.full),
    (3, SP),
    (2, REMOVED),
    pytest.param(3, REMOVED, marks=pytest.mark.full),
]


def worst(ranks: list[dict[str, float]]) -> float:
    return max(error for rank in ranks for error in rank.values())


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("tp", [2, 3])
def test_local_takes_any_rank(workers: WorkerPool, kind: str, tp: int) -> None:
    assert worst(workers(tp, errors, kind, tp, SP, "local", 5)) < BOUND


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"rslora": True},
    "dropout": {"dropout": 0.3},
    "A frozen": {"freeze_a": True},
    "canonical": {"canonical": True},
    "dora": {"dora": True},
    "all with bias": {"rslora": True, "dropout": 0.3, "canonical": True, "dora": True, "bias": True},
    "gather_output": {"gather_output": True, "canonical": True},
}


def kinds_in(around: Around) -> list[str]:
    return sorted({row.kind for row in TABLE if row.around is around})


def _all_errors(tp: int, around: Around, options: dict[str, Any]) -> dict[str, float]:
    kinds = ["column"] if "gather_output" in options else kinds_in(around)
    return {
        f"{kind} {mode} {name}": error
        for kind in kinds
        for mode in MODES
        for name, error in errors(kind, tp, around, mode, **options).items()
    }


@pytest.mark.parametrize(("tp", "around"), LAYOUTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_exact(workers: WorkerPool, option: str, tp: int, around: Around) -> None:
    for rank in workers(tp, _all_errors, tp, around, OPTIONS[option]):
        assert not {name: error for name, error in rank.items() if not error < BOUND}


# -- cost: DESIGN's table of bytes and wide collectives --------------------------------------------------------------

FULL = SEQUENCE * BATCH * D_IN * 8
Z = SEQUENCE * BATCH * RANK * 8


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("mode", "sees", "wide"),
    [("gather", Sees.ALL, 1), ("regather", Sees.SEQUENCE, 3), ("local", Sees.SEQUENCE, 0)],
)
def test_column_keeps_and_sends(workers: WorkerPool, tp: int, mode: str, sees: Sees, wide: int) -> None:
    placement = lookup("column", SP, mode)
    assert (placement.sees, placement.wide) == (sees, wide)
    floor, with_adapter = (workers(tp, cost, "column", tp, SP, m)[0] for m in (None, mode))
    assert floor["kept"] == 0
    assert with_adapter["kept"] == (FULL if sees is Sees.ALL else FULL // tp) + Z
    assert floor["wide"] == 2
    assert with_adapter["wide"] - floor["wide"] == wide


@pytest.mark.parametrize("around", [WHOLE, SP])
@pytest.mark.parametrize("mode", MODES)
def test_row_keeps_its_shard_and_sends_nothing_wide(workers: WorkerPool, mode: str, around: Around) -> None:
    floor, with_adapter = (workers(2, cost, "row", 2, around, m)[0] for m in (None, mode))
    assert with_adapter["kept"] - floor["kept"] == FULL // 2 + (Z // 2 if around is SP else Z)
    assert with_adapter["wide"] == floor["wide"]


@pytest.mark.parametrize(("mode", "wide"), [("gather", 1), ("local", 0)])
def test_column_without_sequence_parallelism(workers: WorkerPool, mode: str, wide: int) -> None:
    floor, with_adapter = (workers(2, cost, "column", 2, WHOLE, m)[0] for m in (None, mode))
    assert with_adapter["wide"] - floor["wide"] == wide


def _predictions(tp: int, around: Around) -> dict[str, tuple[int, ...]]:
    """Counted and predicted, of each kind, mode and option."""
    options = {name: OPTIONS[name] for name in ("plain", "dropout", "A frozen", "canonical", "dora", "all with bias")}
    found = {}
    for kind in kinds_in(around):
        floor = cost(kind, tp, around, None)
        for mode in MODES:
            for name, option in options.items():
                counted = cost(kind, tp, around, mode, **option)
                sent = counted["sent"] - floor["sent"]
                found[f"{kind} {mode} {name}"] = (
                    counted["kept"] - floor["kept"],
                    counted["predicted kept"],
                    sent,
                    counted["predicted sent"],
                )
    return found


@pytest.mark.parametrize(("tp", "around"), LAYOUTS)
def test_predicted_bytes_equal_the_counted(workers: WorkerPool, tp: int, around: Around) -> None:
    for rank in workers(tp, _predictions, tp, around):
        for name, (kept, predicted_kept, sent, predicted_sent) in rank.items():
            assert (kept, sent) == (predicted_kept, predicted_sent), name


# -- the tests can fail: each of these mistakes is far outside the bound ---------------------------------------------


def test_every_collective_of_the_table_can_be_broken() -> None:
    for row in TABLE:
        kinds = {what.partition(" ")[0] for what in breakages(row)}
        assert ("middle" in kinds) == (row.middle is not Middle.AS_IS), row
        assert ("enter" in kinds) == (row.enter is not Enter.AS_IS), row
        assert {"sum_a", "sum_b"} & kinds == {n for n in ("sum_a", "sum_b") if getattr(row, n)}, row


@pytest.mark.parametrize("around", Around)
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.full)])
def test_every_broken_collective_is_caught(workers: WorkerPool, tp: int, around: Around) -> None:
    ranks = workers(tp, errors_when_broken, tp, around)
    assert ranks[0].keys() == {
        (row.kind, row.mode, what) for row in TABLE if row.around is around for what in breakages(row)
    }
    for broken in ranks[0]:
        assert max(rank[broken] for rank in ranks) > 10 * BOUND, broken


def _mutated(mutation: str, kind: str, mode: str) -> dict[str, float]:
    import megatron.core.tensor_parallel as mcore
    from megatron.core.tensor_parallel import mappings

    from lightning_mcore_lora.adapters import layer, sites

    with pytest.MonkeyPatch.context() as patch:
        if mutation == "sum turned into mean":

            def mean(tensor: torch.Tensor, group: Any) -> torch.Tensor:
                summed = mappings.copy_to_tensor_model_parallel_region(tensor, group=group)
                summed.register_hook(lambda grad: grad / group.size())
                return summed

            patch.setattr(mcore, "copy_to_tensor_model_parallel_region", mean)
        elif mutation == "wrong group":
            from megatron.core import parallel_state

            patch.setattr(sites.Site, "group", property(lambda self: parallel_state.get_data_parallel_group()))
        elif mutation == "shard order swapped":

            def shard(self: Any, full: torch.Tensor, name: str) -> torch.Tensor:
                dim = self.plan.dim(name)
                if dim is None:
                    return full
                size, rank = self.site.group.size(), self.site.group.rank()
                blocks = full.chunk(self._stride(name), dim)
                return torch.cat([block.chunk(size, dim)[size - 1 - rank] for block in blocks], dim)

            patch.setattr(layer.LoRAAdapter, "_shard", shard)
        elif mutation == "gate and up not kept apart":
            patch.setattr(sites.Site, "output_parts", property(lambda self: 1))
        elif mutation == "one mask for every rank":
            patch.setattr(layer.LoRAAdapter, "_draw", lambda self, row, device: layer.Dropout.draw(0.3, 0))
            return site_runs.errors(kind, 2, SP, mode, dropout=0.3)
        elif mutation == "another mask in backward":
            from lightning_mcore_lora.adapters import products

            right = products.Dropout.__call__

            def other(self: Any, x: torch.Tensor) -> torch.Tensor:
                in_backward = torch._C._current_graph_task_id() != -1
                return right(products.Dropout(self.p, self.seed + in_backward), x)

            patch.setattr(products.Dropout, "__call__", other)
            return site_runs.errors(kind, 2, SP, mode, dropout=0.3)
        tp = 2
        return site_runs.errors(kind, tp, SP, mode)


@pytest.mark.parametrize(
    ("mutation", "kind", "mode"),
    [
        ("sum turned into mean", "column", "local"),
        ("sum turned into mean", "row", "gather"),
        ("sum turned into mean", "duplicated", "local"),
        ("wrong group", "column", "local"),
        ("wrong group", "column", "regather"),
        ("wrong group", "row", "local"),
        ("shard order swapped", "column", "local"),
        ("shard order swapped", "column", "gather"),
        ("shard order swapped", "row", "local"),
        ("gate and up not kept apart", "column", "local"),
        ("another mask in backward", "column", "local"),
    ],
)
def test_mistake_is_caught(workers: WorkerPool, mutation: str, kind: str, mode: str) -> None:
    world = 4 if mutation == "wrong group" else 2  # two data-parallel ranks, so that the wrong group has as many
    assert worst(workers(world, _mutated, mutation, kind, mode)) > 10 * BOUND


def test_one_mask_for_every_rank_is_caught(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="AssertionError"):
        workers(2, _mutated, "one mask for every rank", "row", "local")


# -- initial factors -------------------------------------------------------------------------------------------------


def _initial(tp: int, mode: str, seed_by_rank: bool = False) -> Any:
    from lightning_mcore_lora.adapters import factors, layer

    with pytest.MonkeyPatch.context() as patch:
        if seed_by_rank:
            original = factors.initial_a
            rank = torch.distributed.get_rank()
            patch.setattr(
                factors, "initial_a", lambda site, width, init, seed, *rest: original(site, width, init, seed + rank)
            )
        patch.setattr(layer.LoRAAdapter, "load_full", lambda self, a, b, magnitude: None)
        found = {}
        for kind in ("column", "row"):
            lora = site_runs.build(kind, tp, SP if tp > 1 else WHOLE, mode).linear.lora
            found[kind] = (lora.plan.placement.a.dim(), lora.a.detach().clone(), lora.b.detach().clone())
        return found


def _whole_a(ranks: list[Any], kind: str) -> torch.Tensor:
    dim = ranks[0][kind][0]
    if dim is None:
        for rank in ranks:
            assert torch.equal(rank[kind][1], ranks[0][kind][1]), "A differs over the ranks that hold it"
        return ranks[0][kind][1]
    return torch.cat([rank[kind][1] for rank in ranks], dim)


@pytest.mark.parametrize("mode", MODES)
def test_initial_a_is_the_same_at_every_size(workers: WorkerPool, mode: str) -> None:
    one = workers(1, _initial, 1, "local")
    for tp in (2, 3):
        ranks = workers(tp, _initial, tp, mode)
        for kind in ("column", "row"):
            whole = _whole_a(ranks, kind)
            assert torch.equal(whole, one[0][kind][1])
            assert 0.9 * D_IN**-0.5 < whole.abs().max() <= D_IN**-0.5  # the full fan, not a shard's
            assert all(not rank[kind][2].any() for rank in ranks)


def test_one_seed_per_rank_is_caught(workers: WorkerPool) -> None:
    ranks = workers(2, _initial, 2, "local", seed_by_rank=True)
    with pytest.raises(AssertionError, match="A differs"):
        _whole_a(ranks, "column")
