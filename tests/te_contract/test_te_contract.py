"""Transformer Engine's linears, as far as they can be checked without a GPU: `nox -s te_contract`."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.te_contract import contract

pytestmark = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="needs Transformer Engine: python -m nox -s te_contract"
)
BOUND = 2e-5
CLASSES = {
    "linear_qkv": ("TELayerNormColumnParallelLinear", "column"),
    "linear_proj": ("TERowParallelLinear", "row"),
    "linear_fc1": ("TELayerNormColumnParallelLinear", "column"),
    "linear_fc2": ("TERowParallelLinear", "row"),
}
WIDTHS = {"linear_qkv": (24, 72), "linear_proj": (24, 24), "linear_fc1": (24, 96), "linear_fc2": (48, 24)}


@pytest.fixture(scope="module")
def oracle() -> Any:
    """One process with folded weights, without and with biases."""
    return {bias: contract.on_ranks(1, contract.folded, bias)[0] for bias in (False, True)}


def _whole(ranks: list[Any], key: tuple[str, str]) -> torch.Tensor:
    parts = [rank["gradients"][key] for rank in ranks]
    sharded, dim, stride, first = parts[0]
    if not sharded:
        assert all(torch.equal(first, part[3]) for part in parts)
        return first
    blocks = [part[3].chunk(stride, dim) for part in parts]
    return torch.cat([block[i] for i in range(stride) for block in blocks], dim)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("mode", contract.MODES)
@pytest.mark.parametrize("tp", [1, 2])
def test_dense(oracle: Any, tp: int, mode: str, bias: bool) -> None:
    ranks = contract.on_ranks(tp, contract.dense, mode, bias)
    first = ranks[0]
    names = [f"decoder.layers.{i}.{o}.{n}" for i in (0, 1) for n in CLASSES for o in [_owner(n)]]
    assert set(first["sites"]) == set(names) == set(first["classes"])
    for name in names:
        leaf = name.rpartition(".")[2]
        assert first["classes"][name] == CLASSES[leaf][0]
        kind, placement, runs, reason = first["sites"][name]
        assert kind == CLASSES[leaf][1]
        assert placement.startswith(f"{kind}{', SP' if tp > 1 else ''}:")
        falls_back = mode == "regather" and tp == 1 and kind == "column"
        assert (runs, reason is not None) == ("gather" if falls_back else mode, falls_back)
        d_in, d_out = WIDTHS[leaf]
        a, b = (contract.RANK, d_in), (d_out, contract.RANK)
        if kind == "row":
            a = (contract.RANK, d_in // tp)
        else:
            b = (d_out // tp, contract.RANK)
            a = a if mode == "local" else (contract.RANK // tp, d_in)
        assert first["shapes"][name] == (a, b)
    assert not first["missing"], "the base keeps its state-dict keys"
    assert first["added"] == {f"{name}.lora.{factor}" for name in names for factor in "ab"}
    assert all(first["flags"].values()), "the norm's output is asked for"
    assert not any(first["gathered"]), "its gathered form has no gradient in Transformer Engine 2"
    assert not any(first["flags after removal"])
    assert first["returns"] == first["returns with adapters"], "the linears return what they did"
    expected = oracle[bias]
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for key, gradient in expected["gradients"].items():
        error = (_whole(ranks, key) - gradient).abs().max() / gradient.abs().max()
        assert error < BOUND, (key, error)


def _owner(leaf: str) -> str:
    return "mlp" if "fc" in leaf else "self_attention"


SHARED = {"per_expert": "", "shared": "ab"}
EXPERT_CLASSES = {
    "experts.linear_fc1": ("TEColumnParallelGroupedLinear", "column, collectives removed"),
    "experts.linear_fc2": ("TERowParallelGroupedLinear", "row, collectives removed"),
    "shared_experts.linear_fc1": ("TEColumnParallelLinear", "column"),
    "shared_experts.linear_fc2": ("TERowParallelLinear", "row"),
    "router": ("TopKRouter", "duplicated"),
}


@pytest.fixture(scope="module")
def mixture_oracle() -> Any:
    """One process with folded weights, by what experts share."""
    return {shared: contract.on_ranks(1, contract.folded_mixture, shared, {})[0] for shared in ("", "ab")}


OVERLAP = {"moe_shared_expert_overlap": True}


@pytest.mark.parametrize(
    ("tp", "layout", "config"),
    [
        (1, "per_expert", {}),
        (2, "per_expert", {}),
        (2, "per_expert", OVERLAP),
        (2, "shared", {}),
        (2, "per_expert", {"bias_activation_fusion": True}),
    ],
)
def test_mixture_of_experts(
    mixture_oracle: Any, monkeypatch: pytest.MonkeyPatch, tp: int, layout: str, config: dict[str, bool]
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # fused kernels are compiled otherwise
    ranks = contract.on_ranks(tp, contract.mixture, {"expert_adapters": layout}, config)
    first, expected = ranks[0], mixture_oracle[SHARED[layout]]
    assert not first["missing"], "the base keeps its state-dict keys"
    for layer in ("decoder.layers.0.mlp.", "decoder.layers.1.mlp."):
        for name, (cls, placement) in EXPERT_CLASSES.items():
            assert first["classes"][layer + name] == cls
            found, reason = first["sites"][layer + name]
            around = ", SP" if tp > 1 and "removed" not in placement else ""
            if config == OVERLAP and name.startswith("shared"):
                around = ", collectives removed"
            assert found.startswith(placement + around + ":")
            assert reason is None
            assert {f"{layer}{name}.lora.{factor}" for factor in "ab"} <= first["added"]
        rows = 2 * 48 // tp
        assert first["merged"][f"{layer}experts.linear_fc1"] == (contract.EXPERTS, rows, 24)
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for key, gradient in expected["gradients"].items():
        error = (_whole(ranks, key) - gradient).abs().max() / gradient.abs().max()
        assert error < 5 * BOUND, (key, error)


@pytest.mark.parametrize("tp", [1, 2])
def test_predicted_bytes_equal_the_counted(tp: int) -> None:
    for rank in contract.on_ranks(tp, contract.kept):
        for name, (counted, predicted) in rank.items():
            assert counted == predicted, name


def test_frozen_linears_keep_their_cast_weights() -> None:
    counted, estimated = contract.on_ranks(1, contract.cast)[0]
    assert counted == estimated > 0


def test_user_buffers_fall_back() -> None:
    found = contract.on_ranks(2, contract.user_buffers)[0]
    assert [mode for mode, _ in found["regather"]] == ["gather", "regather"]
    assert "user buffers" in found["regather"][0][1]
    assert [mode for mode, _ in found["local"]] == ["local", "local"]
    assert "turns off the linear's all-gather overlap" in found["local"][0][1]
    assert found["local"][1][1] is None


@pytest.mark.parametrize("tp", [1, 2])
def test_duplicated_linear(tp: int) -> None:
    for rank in contract.on_ranks(tp, contract.duplicated):
        assert rank["kind"] == "duplicated"
        assert max(rank["errors"].values()) < BOUND
