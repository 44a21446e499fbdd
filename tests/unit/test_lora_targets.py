"""What is adapted, counted and trained, by the settings that choose it."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mcore_lora import (
    LoRAConfig,
    apply_lora,
    lora_plus_groups,
)
from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.adapters.matching import matches
from tests.mcore_runs import model_at
from tests.workers import WorkerError, WorkerPool


def _model(tp: int, **config: Any) -> Any:
    return model_at(tp, **config)[0]


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("linear_fc1", "decoder.layers.1.mlp.linear_fc1", True),
        ("mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc1", True),
        ("fc1", "decoder.layers.1.mlp.linear_fc1", False),
        ("*.layers.1.*", "decoder.layers.1.mlp.linear_fc1", True),
        ("*.layers.1.*", "decoder.layers.11.mlp.linear_fc1", False),
        ("*.layers.1.linear_fc1", "decoder.layers.1.mlp.linear_fc1", False),
        ("layers.1.*.linear_fc1", "decoder.layers.1.mlp.linear_fc1", True),
        ("*.linear_fc1", "linear_fc1", False),
        ("output_layer", "output_layer", True),
    ],
)
def test_patterns(pattern: str, path: str, hit: bool) -> None:
    assert matches(pattern, path) == hit


def _adapted(lora: dict[str, Any], **config: Any) -> list[str]:
    return [site.site for site in apply_lora(_model(1, **config), LoRAConfig(rank=4, **lora)).sites]


FC1, FC2 = (f"decoder.layers.{{}}.mlp.linear_fc{i}" for i in (1, 2))


@pytest.mark.parametrize(
    ("lora", "adapted"),
    [
        ({"target_modules": ["linear_fc1"]}, [FC1.format(0), FC1.format(1)]),
        ({"target_modules": ["*.layers.1.*"], "exclude_modules": ["self_attention.*"]}, [FC1.format(1), FC2.format(1)]),
        ({"target_modules": ["linear_fc2"], "layers_to_transform": [1]}, [FC2.format(1)]),
        ({"target_modules": ["linear_fc2", "output_layer"], "layers_to_transform": 0}, [FC2.format(0)]),
        ({"target_modules": ["output_layer"]}, ["output_layer"]),
        (
            {"target_modules": ["output_layer"], "modules_to_save": ["mlp", "final_layernorm"]},
            ["output_layer", "decoder.layers.0.mlp", "decoder.layers.1.mlp", "decoder.final_layernorm"],
        ),
    ],
)
def test_targets(workers: WorkerPool, lora: dict[str, Any], adapted: list[str]) -> None:
    assert workers(1, _adapted, lora)[0] == adapted


def _second_stage() -> list[str]:
    model = _model(1)
    for layer in model.decoder.layers:
        layer.layer_number += 2  # as on the second of two pipeline stages
    report = apply_lora(model, LoRAConfig(rank=4, target_modules=("linear_fc1",), layers_to_transform=(3,)))
    return [site.site for site in report.sites]


def test_layers_are_numbered_over_pipeline_stages(workers: WorkerPool) -> None:
    assert workers(1, _second_stage)[0] == [FC1.format(3)]


def _counts() -> dict[str, Any]:
    model = _model(1)
    lora = {"target_modules": ("linear_qkv",), "rank_pattern": {"*.layers.1.*": 2}, "alpha_pattern": {"linear_qkv": 6}}
    report = apply_lora(model, LoRAConfig(rank=4, dora=True, modules_to_save=("final_layernorm",), **lora))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "counted": trainable,
        "reported": report.trainable_parameters,
        "total": (sum(p.numel() for p in model.parameters()), report.total_parameters),
        "ranks": [site.rank for site in report.sites],
        "scales": [adapter.plan.scale for _, adapter in adapters(model)],
    }


def test_report_counts_what_trains(workers: WorkerPool) -> None:
    found = workers(1, _counts)[0]
    assert found["counted"] == found["reported"] == 4 * (24 + 72) + 2 * (24 + 72) + 2 * 72 + 24
    assert found["total"][0] == found["total"][1]
    assert found["ranks"] == [4, 2, None]
    assert found["scales"] == [1.5, 3.0]


def _two_models() -> list[str]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _model(1), _model(1)

    two = Two()
    apply_lora(two, LoRAConfig(rank=4, target_modules=("linear_qkv",), modules_to_save=("final_layernorm",)))
    return [name for name, p in two.named_parameters() if p.requires_grad and "lora" not in name]


def test_each_of_two_models_is_matched(workers: WorkerPool) -> None:
    assert workers(1, _two_models)[0] == [f"{name}.decoder.final_layernorm.weight" for name in ("first", "second")]


def _zero_row() -> bool:
    model = _model(1)
    with torch.no_grad():
        model.output_layer.weight[3] = 0
    apply_lora(model, LoRAConfig(rank=4, dora=True, target_modules=("output_layer",)))
    ids = torch.arange(8)[None]
    loss = model(ids, ids, None, labels=ids).mean()
    loss.backward()
    return bool(loss.isfinite()) and all(p.grad.isfinite().all() for p in model.output_layer.lora.parameters())


def test_dora_stands_a_row_of_zeros(workers: WorkerPool) -> None:
    assert workers(1, _zero_row)[0]


def _groups() -> dict[str, Any]:
    model = _model(1)
    apply_lora(model, LoRAConfig(rank=4, dora=True, freeze_a=True, modules_to_save=("final_layernorm",)))
    rest, high = lora_plus_groups(model, lr=1e-3, ratio=4.0)
    names = {id(p): name for name, p in model.named_parameters()}
    return {"rest": {names[id(p)].rpartition(".")[2] for p in rest["params"]}, "high": high, "names": names}


def test_lora_plus_groups(workers: WorkerPool) -> None:
    found = workers(1, _groups)[0]
    assert found["rest"] == {"magnitude", "weight"}, "a frozen A is in no group"
    assert found["high"]["lr"] == 4e-3
    assert len(found["high"]["params"]) == 8


def _initial(init: str) -> tuple[torch.Tensor, ...]:
    model = _model(1)
    apply_lora(model, LoRAConfig(rank=8, init=init, canonical=True, dtype="bfloat16"))
    adapter = next(a for _, a in adapters(model) if a.site.leaf == "linear_qkv")
    assert adapter.a.dtype == adapter.b.dtype == torch.bfloat16
    return tuple(adapter.a.detach().float().chunk(3))


@pytest.mark.parametrize(
    ("init", "largest", "spread"),
    [
        ("kaiming", 24**-0.5, (24 * 3) ** -0.5),
        ("xavier", (6 / 32) ** 0.5, (2 / 32) ** 0.5),
        ("gaussian", None, 1 / 8),
    ],
)
def test_initial_a(workers: WorkerPool, init: str, largest: float | None, spread: float) -> None:
    parts = workers(1, _initial, init)[0]
    assert not torch.equal(parts[0], parts[1]), "q, k and v are drawn apart"
    for part in parts:
        assert part.std().item() == pytest.approx(spread, rel=0.2)
        if largest is not None:
            assert 0.9 * largest < part.abs().max() <= largest * 1.01


@pytest.mark.parametrize(
    ("tp", "lora", "match"),
    [
        (1, {"exclude_modules": ["linear_fc3"]}, r"exclude_modules: 'linear_fc3' matches no linear.*near.*'linear_fc"),
        (1, {"rank_pattern": {"output_layer": 2}}, r"'output_layer' matches none of the linears that target_modules"),
        (1, {"exclude_modules": ["*"]}, r"exclude_modules=\('\*',\) and layers_to_transform=None leave none"),
        (1, {"rank_pattern": {"*.layers.7.*": 2}}, r"rank_pattern: '\*.layers.7.\*' matches no linear"),
        (1, {"modules_to_save": ["final_layernrom"]}, r"no module of the model; near names: \['final_layernorm'"),
        (1, {"modules_to_save": ["mlp"]}, r"linear_fc1'.* are in target_modules and in modules_to_save"),
        (1, {"layers_to_transform": [1, 5]}, r"layers_to_transform: the model has no layer \[5\]; it has \[0, 1\]"),
        (3, {"sequence_mode": "regather"}, r"rank=4 is not divisible by tensor_parallel_size=3.*sequence_mode='local'"),
        (
            1,
            {"target_modules": ["linear_kqv"]},
            r"'linear_kqv' matches no linear of the model; near names: \['linear_qkv",
        ),
    ],
)
def test_what_cannot_be_is_refused(workers: WorkerPool, tp: int, lora: dict[str, Any], match: str) -> None:
    with pytest.raises(WorkerError, match=match):
        workers(tp, _refused, tp, lora)


def _refused(tp: int, lora: dict[str, Any]) -> None:
    model = _model(tp, num_attention_heads=6, vocab_size=66)
    try:
        apply_lora(model, LoRAConfig(rank=4, **lora))
    finally:
        assert all(parameter.requires_grad for parameter in model.parameters()), "the model was changed"
        assert not list(adapters(model))
