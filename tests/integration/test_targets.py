"""Routers and output layers, tied ones too, equal one process with the adapter folded into the weight."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore_lora import LoRAConfig, apply_lora, build_gpt_model
from lightning_mcore_lora.adapters import adapters
from tests.integration.test_parity import whole
from tests.mcore_runs import SEQUENCE, VOCAB, fill_by_name, model_at
from tests.oracle import relative_error
from tests.runs import places
from tests.workers import WorkerPool

RANK, ALPHA = 4, 6.0
MOE = {"num_moe_experts": 4, "moe_router_topk": 2}
BOUND = {"router": 5e-4, "output_layer": 2e-5}


def _model(tp: int, target: str, tied: bool) -> tuple[Any, Any]:
    model, parallel = model_at(tp, **(MOE if target == "router" else {}))
    if tied:
        model = build_gpt_model(
            model.config,
            parallel,
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=True,
        )
    fill_by_name(model, parallel)
    return model, parallel


def _factors(name: str, d_in: int, d_out: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    a = torch.randn(RANK, d_in, generator=generator) * d_in**-0.5
    return a, torch.randn(d_out, RANK, generator=generator) * 0.3


def _loss(model: Any) -> Tensor:
    ids = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(SEQUENCE)[None].expand_as(ids)
    return model(ids, positions, None, labels=ids.roll(-1, 1)).mean()


def _adapted(tp: int, target: str, tied: bool, mode: str) -> dict[str, Any]:
    model, parallel = _model(tp, target, tied)
    apply_lora(model, LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=(target,), sequence_mode=mode))
    parameters = {}
    for _, adapter in adapters(model):
        adapter.load_full(*_factors(adapter.site.name, adapter.site.d_in, adapter.site.d_out))
        parameters |= {(adapter.site.name, name): p for name, p in adapter.named_parameters()}
    loss = _loss(model)
    loss.backward()
    gradients = {key: p.grad for key, p in parameters.items()}
    return {**places(parameters, parallel), "loss": loss.item(), "gradients": gradients}


def _folded(target: str, tied: bool) -> dict[str, Any]:
    model, _ = _model(1, target, False)
    if tied:
        model.output_layer.weight.data.copy_(model.embedding.word_embeddings.weight.data)
    modules = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] == target}
    for name, module in modules.items():
        a, b = _factors(name, module.weight.shape[1], module.weight.shape[0])
        module.weight.data.add_(ALPHA / RANK * b @ a)
    loss = _loss(model)
    loss.backward()
    gradients = {}
    for name, module in modules.items():
        a, b = _factors(name, module.weight.shape[1], module.weight.shape[0])
        gradients[name, "a"] = ALPHA / RANK * b.T @ module.weight.grad
        gradients[name, "b"] = ALPHA / RANK * module.weight.grad @ a.T
    return {"loss": loss.item(), "gradients": gradients}


@pytest.mark.parametrize(
    ("target", "tied"),
    [("router", False), ("output_layer", True), pytest.param("output_layer", False, marks=pytest.mark.full)],
)
def test_equals_the_folded_weight(workers: WorkerPool, target: str, tied: bool) -> None:
    expected = workers(1, _folded, target, tied)[0]
    for tp, mode in ((1, "local"), (2, "local"), (2, "gather")):
        ranks = workers(tp, _adapted, tp, target, tied, mode)
        for rank in ranks:
            assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert ranks[0]["gradients"].keys() == expected["gradients"].keys()
        for key, gradient in expected["gradients"].items():
            value = whole(ranks, [rank["gradients"][key] for rank in ranks], key)
            assert relative_error(value, gradient.double()) < BOUND[target], (key, tp, mode)
