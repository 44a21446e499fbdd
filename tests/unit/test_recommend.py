"""The search for a layout that fits."""

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore_lora import LoRAConfig, Recommendation, estimate_memory, recommend
from lightning_mcore_lora.cli import main
from lightning_mcore_lora.memory.recommend import DoesNotFitError
from lightning_mcore_lora.parallel import ParallelSizes
from tests.unit.test_memory_estimate import PUBLISHED

QWEN3 = PUBLISHED["Qwen3-8B"] | {"num_hidden_layers": 4}
MIXTURE = PUBLISHED["Qwen3-30B-A3B"] | {"num_hidden_layers": 2}
DOCS = Path(__file__).parents[2] / "docs/memory.md"


def find(budget: float, devices: int = 4, model: dict[str, Any] = QWEN3, **options: Any) -> Recommendation:
    return recommend(model, budget, devices, **({"sequence_length": 4096} | options))


def test_what_fits_as_asked_is_left_alone() -> None:
    found = find(1000)
    assert found.chosen.settings == ()
    assert found.chosen.throughput == 1
    assert found.tried == ()
    assert found.estimate.total == estimate_memory(QWEN3, ParallelSizes(4), sequence_length=4096).total


def test_smaller_budgets_cost_more() -> None:
    found = [find(1000, micro_batch_size=2)]
    for _ in range(50):
        try:
            found.append(find(found[-1].estimate.total_gib - 1e-6, micro_batch_size=2))
        except DoesNotFitError as error:
            leanest = float(re.search(r"the leanest takes ([\d.]+) GiB", str(error))[1])  # type: ignore[index]
            assert leanest == pytest.approx(found[-1].estimate.total_gib, abs=0.006), "it was found before"
            break
    else:
        pytest.fail("budgets below the leanest fit")
    assert len(found) > 5
    for before, after in itertools.pairwise(found):
        assert after.estimate.total_gib <= after.budget_gib
        assert after.chosen.throughput <= before.chosen.throughput
        assert all(c.throughput >= after.chosen.throughput for c in after.tried)
        assert all(c.estimate.total_gib > after.budget_gib for c in after.tried)
    used = " ".join(setting for recommendation in found for setting in recommendation.chosen.settings)
    assert "micro_batch_size=1" in used
    assert "recompute_granularity" in used
    assert {recommendation.estimate.sizes.tensor for recommendation in found} >= {1, 2}


def test_settings_are_what_is_estimated() -> None:
    """Every setting that is named, given by hand."""
    found = find(8, lora=LoRAConfig(sequence_mode="gather"), precision="bf16-mixed")
    given: dict[str, Any] = {"lora": LoRAConfig(sequence_mode="gather"), "precision": "bf16-mixed"}
    for setting in found.chosen.settings:
        name, _, value = setting.partition("=")
        if hasattr(given["lora"], name):
            given["lora"] = dataclasses.replace(given["lora"], **{name: eval(value)})
        else:
            given[name] = eval(value)
    again = estimate_memory(QWEN3, found.estimate.sizes, sequence_length=4096, **given)
    assert again.total == found.estimate.total


@pytest.mark.parametrize("devices", [1, 3, 6, 12])
def test_any_number_of_devices(devices: int) -> None:
    assert find(1000, devices).chosen.settings == ()


def test_experts() -> None:
    found = find(4.2, 8, MIXTURE)
    assert found.estimate.sizes.expert > 1
    assert "EP=" in found.why


def test_experts_are_split_with_every_layer_recomputed() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    whole = estimate_memory(MIXTURE, ParallelSizes(8), sequence_length=4096, **full)
    found = find(0.9 * whole.total_gib, 8, MIXTURE, **full)
    assert found.estimate.sizes.expert > 1
    assert "EP=" in found.why


def test_a_remedy_that_does_not_go_with_the_model_is_no_obstacle() -> None:
    """GPT-OSS's activation cannot be fused so."""
    model = PUBLISHED["GPT-OSS-120B"] | {"num_hidden_layers": 2, "num_local_experts": 8}
    asked = estimate_memory(model, ParallelSizes(1), sequence_length=4096, micro_batch_size=2)
    found = find(0.7 * asked.total_gib, 1, model, micro_batch_size=2)
    assert found.chosen.settings


def test_remedies_that_save_together_only() -> None:
    """With the MLP computed again the attention's part is no peak of its own."""
    model = QWEN3 | {"num_hidden_layers": 3}
    options = {"sequence_length": 512, "lora": LoRAConfig(rank=64)}
    modules = [["core_attn"], ["mlp"], ["core_attn", "mlp"]]
    plain, attention, mlp, both = (
        estimate_memory(model, ParallelSizes(1), **options, **more)
        for more in ({}, *({"recompute_granularity": "selective", "recompute_modules": m} for m in modules))
    )
    assert both.total < mlp.total < plain.total <= attention.total
    assert find(both.total_gib + 1e-6, 1, model, **options).estimate.total == both.total


def test_float32_takes_less_where_logits_are_most() -> None:
    """Half precision casts logits for the loss; it is no remedy then."""
    small = PUBLISHED["Qwen3-8B"] | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 1}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    on_cpu = {"sequence_length": 4096, "accelerator": "cpu"}
    single, half = (
        estimate_memory(small, ParallelSizes(1), precision=name, **on_cpu, **full) for name in ("32-true", "bf16-true")
    )
    assert single.total < half.total
    found = find(single.total_gib + 1e-6, 1, small, precision="32-true", **on_cpu)
    assert found.estimate.arguments["precision"] == "32-true"


def test_layouts_that_nothing_makes_fit_are_named() -> None:
    with pytest.raises(DoesNotFitError) as alone:
        find(0.01, 1)
    leanest = float(re.search(r"the leanest takes ([\d.]+) GiB", str(alone.value))[1])  # type: ignore[index]
    found = find(leanest - 0.01, 2)
    assert found.estimate.sizes.tensor == 2
    assert re.search(r"; nothing makes fit: TP=1, DP=2 \([\d.]+ GiB\)", found.why)
    assert all(estimate.total_gib > found.budget_gib for estimate in found.never)


def test_nothing_fits() -> None:
    with pytest.raises(DoesNotFitError, match=r"budget_gib=0.01 on 4 device\(s\): the leanest .* Take more devices"):
        find(0.01)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"budget": 0}, "budget_gib=0 must be a positive number"),
        ({"budget": float("nan")}, "budget_gib=nan must be"),
        ({"budget": "72"}, "budget_gib='72' must be"),
        ({"budget": 8, "devices": 0}, "devices=0 must be a positive integer"),
        ({"budget": 8, "sizes": ParallelSizes(1)}, "sizes is what recommend searches"),
        ({"budget": 8, "optimizer": "lbfgs"}, "optimizer='lbfgs' must be one of"),
        ({"budget": 8, "sequence_length": 0}, "sequence_length=0 must be a positive integer"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        find(**arguments)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    command = next(c for c in re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL) if " recommend " in c)
    arguments = shlex.split(command.replace("model-dir", str(tmp_path)))[1:]
    main([*arguments, "--json", "true"])
    found = json.loads(capsys.readouterr().out)
    main(arguments)
    table = capsys.readouterr().out
    assert f"{found['estimate']['total'] / 2**30:.2f}" in table
    assert "fits" in table
    with pytest.raises(SystemExit, match=r"error: nothing fits budget_gib=0.001"):
        main([*arguments, "--budget_gib", "0.001"])
