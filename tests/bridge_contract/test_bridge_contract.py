"""Models of Megatron-Bridge's providers work with MCoreTP and apply_lora: `nox -s bridge_contract`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import families
from tests.oracle import relative_error
from tests.te_contract import standin
from tests.te_contract.contract import on_ranks

pytestmark = pytest.mark.skipif(
    find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge: python -m nox -s bridge_contract"
)


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> Tensor:
    return model.eval()(families.tokens()[:, :-1]).logits


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    standin.install()  # peft, too, imports Transformer Engine where it is installed
    return families.write("llama", tmp_path_factory.mktemp("bridge") / "base")


@pytest.mark.parametrize("tp", [1, 2])
def test_provided_model_is_adapted_and_exported(directory: Path, tp: int) -> None:
    from peft import PeftModel

    from tests.bridge_contract import contract

    ranks = on_ranks(tp, contract.train, str(directory))
    first = ranks[0]
    assert "TELayerNormColumnParallelLinear" in first["classes"]
    assert len(first["sites"]) == 8
    assert relative_error(first["base"], logits_of(families.reference(directory))) < 1e-4
    assert relative_error(first["logits"], first["base"]) > 1e-2
    with_peft = PeftModel.from_pretrained(families.reference(directory), directory.parent / "adapter")
    assert relative_error(first["logits"], logits_of(with_peft)) < 1e-4
    for other in ("loaded", "merged"):
        assert relative_error(first[other], first["logits"]) < 1e-4
    assert "give base=DIR" in first["refusal"]


def test_trainer_with_mcore_tp(directory: Path) -> None:
    from tests.bridge_contract import contract

    one, two = (on_ranks(tp, contract.fit, str(directory))[0]["logits"] for tp in (1, 2))
    assert relative_error(two, one) < 1e-4
    assert relative_error(one, logits_of(families.reference(directory))) > 1e-2


os.environ |= {"HF_HUB_OFFLINE": "1", "PL_GLOBAL_SEED": "7"}
