"""Training through the Trainer equals the oracle, at every layout and in every mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.oracle import Oracle, Run, relative_error
from tests.runs import CLIP, train
from tests.workers import WorkerPool

MODES = ("gather", "regather", "local")
#: (TP, SP, DP): TP 1/2/3 x SP on/off x DP 1/2.
LAYOUTS = [(tp, sp, dp) for tp in (1, 2, 3) for sp in (False, True) for dp in (1, 2) if tp > 1 or not sp]
#: Every pair of values of (TP, SP, DP, mode) occurs in these.
PAIRWISE = {
    (1, False, 1, "local"),
    (1, False, 2, "gather"),
    (1, False, 2, "regather"),
    (2, False, 2, "local"),
    (2, True, 1, "gather"),
    (2, True, 1, "regather"),
    (2, True, 2, "local"),
    (3, False, 1, "gather"),
    (3, False, 1, "regather"),
    (3, True, 2, "regather"),
    (3, True, 1, "local"),
}
CASES = [
    pytest.param(*layout, mode, marks=() if (*layout, mode) in PAIRWISE else pytest.mark.full)
    for layout in LAYOUTS
    for mode in MODES
]
LOSS_BOUND, GRADIENT_BOUND = 1e-5, 2e-5


def whole(ranks: list[dict[str, Any]], values: list[Tensor], key: tuple[str, str]) -> Tensor:
    """Put a factor together from its shards; replicas must be equal to the bit."""
    sharded, dim, parts = ranks[0]["marks"][key]
    by_tp: dict[int, Tensor] = {}
    for rank, value in zip(ranks, values, strict=True):
        other = by_tp.setdefault(rank["tp_rank"], value)
        assert torch.equal(other, value), f"{key} differs over data-parallel ranks"
    shards = [by_tp[i] for i in sorted(by_tp)]
    if not sharded:
        assert all(torch.equal(shards[0], shard) for shard in shards), f"{key} differs over tensor-parallel ranks"
        return shards[0]
    blocks = [shard.chunk(parts, dim) for shard in shards]
    return torch.cat([shard[part] for part in range(parts) for shard in blocks], dim)


def compare(ranks: list[dict[str, Any]], expected: Run, sequence: bool) -> dict[str, float]:
    """The largest relative error of each kind."""
    errors: dict[str, float] = {}

    def note(kind: str, error: float) -> None:
        errors[kind] = max(errors.get(kind, 0.0), error)

    for rank in ranks:
        assert not rank["frozen"]
        note("norm", max(abs(a - b) / b for a, b in zip(rank["norms"], expected.norms, strict=True)))
    for layer in range(tiny.LAYERS):
        for site in tiny.SITES:
            owner = "mlp" if "fc" in site else "self_attention"
            for factor in ("a", "b"):
                key = (f"decoder.layers.{layer}.{owner}.{site}", factor)
                for step in range(tiny.STEPS):
                    value = whole(ranks, [rank["gradients"][step][key] for rank in ranks], key)
                    note("gradient", relative_error(value, expected.gradients[step][layer, site, factor]))
                value = whole(ranks, [rank["factors"][key] for rank in ranks], key)
                note("weight", relative_error(value, expected.factors[layer, site, factor]))
    # The first microbatch holds the first samples of each data-parallel rank.
    dp = 1 + max(rank["dp_rank"] for rank in ranks)
    shards: dict[int, list[Tensor]] = {}
    for rank in sorted(ranks, key=lambda rank: rank["tp_rank"]):
        shards.setdefault(rank["dp_rank"], []).append(rank["input_gradient"])
    for dp_rank, parts in shards.items():
        value = torch.cat(parts) if sequence else parts[0]
        value = value.transpose(0, 1) / dp  # the oracle's loss is the mean over data-parallel ranks too
        note("input", relative_error(value, expected.input_gradient[[dp_rank + i * dp for i in range(2 // dp)]]))
    return errors


@pytest.mark.parametrize(("tp", "sp", "dp", "mode"), CASES)
def test_equals_oracle(
    workers: WorkerPool, tiny_llama: Path, oracle_run: Run, tp: int, sp: bool, dp: int, mode: str
) -> None:
    ranks = workers(tp * dp, train, str(tiny_llama), tp, sp, mode)
    errors = compare(ranks, oracle_run, sp)
    assert errors["gradient"] < GRADIENT_BOUND, errors
    assert errors["input"] < GRADIENT_BOUND, errors
    assert errors["norm"] < LOSS_BOUND, errors
    assert errors["weight"] < LOSS_BOUND, errors
    losses = [sum(rank["losses"][i] for rank in ranks) / len(ranks) for i in range(2 * tiny.STEPS)]
    for step, reference in enumerate(oracle_run.losses):
        assert abs(sum(losses[2 * step : 2 * step + 2]) / 2 - reference) < LOSS_BOUND * reference


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.full)])
def test_gather_and_regather_are_bitwise_equal(workers: WorkerPool, tiny_llama: Path, tp: int) -> None:
    one, other = (workers(tp, train, str(tiny_llama), tp, True, mode) for mode in ("gather", "regather"))
    for a, b in zip(one, other, strict=True):
        assert a["losses"] == b["losses"]
        assert torch.equal(a["input_gradient"], b["input_gradient"])
        assert all(torch.equal(a["factors"][key], b["factors"][key]) for key in a["factors"])


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2)])
def test_every_token_weighs_the_same(workers: WorkerPool, tiny_llama: Path, tp: int, dp: int) -> None:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(tiny.STEPS * tiny.SAMPLES_PER_STEP, tiny.SEQUENCE, generator=generator)
    mask = (mask < torch.linspace(0.1, 0.9, len(mask))[:, None]).float()  # samples differ much in their tokens
    expected = Oracle(tiny_llama).train(CLIP, mask.double())
    ranks = workers(tp * dp, train, str(tiny_llama), tp, tp > 1, "local", mask)
    for rank in ranks:  # of the summed loss; the oracle's is divided by the step's tokens
        rank["input_gradient"] = rank["input_gradient"] / mask[: tiny.SAMPLES_PER_STEP].sum() * dp
    errors = compare(ranks, expected, tp > 1)
    assert errors["input"] < GRADIENT_BOUND, errors
    assert errors["gradient"] < GRADIENT_BOUND, errors
    assert errors["weight"] < LOSS_BOUND, errors
    assert errors["norm"] < LOSS_BOUND, errors


def _train_with_mistake(mistake: str, directory: str) -> dict[str, Any]:
    from lightning_mcore_lora.adapters.layer import LoRAAdapter

    right = LoRAAdapter.defer_sums

    def defer_sums(self: LoRAAdapter, defer: bool) -> None:
        right(self, defer)
        if mistake == "sums left to nobody":
            self.a.sequence_parallel = self.b.sequence_parallel = False  # type: ignore[attr-defined]
        elif mistake == "sums taken twice":
            self.sums_in_autograd = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoRAAdapter, "defer_sums", defer_sums)
        return train(directory, 2, True, "local")


@pytest.mark.parametrize("mistake", ["sums left to nobody", "sums taken twice"])
def test_mistake_is_caught(workers: WorkerPool, tiny_llama: Path, oracle_run: Run, mistake: str) -> None:
    ranks = workers(2, _train_with_mistake, mistake, str(tiny_llama))
    if mistake == "sums left to nobody":
        with pytest.raises(AssertionError, match="differs over tensor-parallel ranks"):
            compare(ranks, oracle_run, True)
    else:
        assert compare(ranks, oracle_run, True)["gradient"] > 10 * GRADIENT_BOUND
