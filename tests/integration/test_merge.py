"""Adapters in base weights: in a model, and from directory to directory by the command line."""

import json
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lightning_mcore_lora import cli
from tests import families, peft_runs
from tests.integration.test_families import ALPHA, ATTENTION, RANK, logits_of, trained_by_peft, with_peft
from tests.integration.test_peft import peft_saves
from tests.oracle import relative_error
from tests.workers import WorkerPool


def run(*arguments: object) -> None:
    """The command line, in this process."""
    with warnings.catch_warnings():
        cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def by_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that split in three."""
    root = tmp_path_factory.mktemp("three")
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 8,
    }
    return {
        "llama": families.write("llama", root / "llama", **sizes),
        "qwen3_moe": families.write("qwen3_moe", root / "moe", **sizes),
    }


@pytest.mark.parametrize(
    ("name", "dora"), [pytest.param("llama", False, marks=pytest.mark.full), ("llama", True), ("qwen3_moe", False)]
)
def test_merged_bytes_are_the_same_at_every_layout(
    workers: WorkerPool, by_three: dict[str, Path], tmp_path: Path, name: str, dora: bool
) -> None:
    directory = by_three[name]
    targets = {"target_modules": [*ATTENTION, *([] if name == "qwen3_moe" else ["gate_proj", "up_proj", "down_proj"])]}
    if name == "qwen3_moe":
        targets["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    model, _ = trained_by_peft(directory, tmp_path / "adapter", **targets, use_dora=dora)
    run("merge", "--base", directory, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged")
    expected = logits_of(model)
    assert relative_error(logits_of(families.reference(tmp_path / "merged")), expected) < 1e-4
    layouts = [(1, 1, 1), (2, 1, 2), (3, 1, 3), *([(2, 2, 1)] if name == "qwen3_moe" else [])]
    for layout in layouts:
        in_place = workers(layout[0], peft_runs.merged, str(directory), layout, str(tmp_path / "adapter"))
        from_disk = workers(layout[0], peft_runs.loaded_weights, str(tmp_path / "merged"), layout)
        for (before, after, weights), whole in zip(in_place, from_disk, strict=True):
            assert relative_error(before, expected) < 1e-4
            assert relative_error(after, before) < 1e-4
            assert weights.keys() == whole.keys()
            assert [key for key in whole if not torch.equal(weights[key], whole[key])] == [], layout


def test_merged_bfloat16_bytes_are_the_same_at_every_layout(
    workers: WorkerPool, by_three: dict[str, Path], tmp_path: Path
) -> None:
    base, half = tmp_path / "base", {"params_dtype": torch.bfloat16}
    families.reference(by_three["llama"]).to(torch.bfloat16).save_pretrained(base)
    trained_by_peft(by_three["llama"], tmp_path / "adapter", target_modules=[*ATTENTION, "gate_proj", "down_proj"])
    run("merge", "--base", base, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged")
    for layout in [(1, 1, 1), (2, 1, 2), (3, 1, 3)]:
        in_place = workers(layout[0], peft_runs.merged, str(base), layout, str(tmp_path / "adapter"), **half)
        from_disk = workers(layout[0], peft_runs.loaded_weights, str(tmp_path / "merged"), layout, **half)
        for (_, _, weights), whole in zip(in_place, from_disk, strict=True):
            assert [key for key in whole if not torch.equal(weights[key], whole[key])] == [], layout


@pytest.mark.parametrize("name", families.MODELS)
def test_merged_directory_answers_alike(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    from tests.integration.test_families import peft_targets

    model, _ = trained_by_peft(models[name], tmp_path / "adapter", **peft_targets(name))
    from lightning_mcore_lora.peft.merge import merge_directory

    merge_directory(models[name], tmp_path / "adapter", tmp_path / "merged")
    assert relative_error(logits_of(families.reference(tmp_path / "merged")), logits_of(model)) < 1e-4
    before, after = (load_file(folder / "model.safetensors") for folder in (models[name], tmp_path / "merged"))
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype for key in before)


def test_merge_rounds_once_and_keeps_the_rest(models: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    families.reference(models["llama"]).to(torch.bfloat16).save_pretrained(base, max_shard_size="20KB")
    (base / "tokenizer.json").write_text("{}")
    trained_by_peft(models["llama"], tmp_path / "adapter", target_modules=["q_proj"])
    run("merge", "--base", base, "--adapter", tmp_path / "adapter", "--out", tmp_path / "out")
    names = {file.name for file in base.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert sum(name.endswith(".safetensors") for name in names) > 2
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for file in base.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors, safe_open(tmp_path / "out" / file.name, "pt") as merged:
            assert tensors.metadata() == merged.metadata()
            for key in tensors.keys():  # noqa: SIM118
                expected = tensors.get_tensor(key)
                if "q_proj" in key:
                    module = f"base_model.model.{key.removesuffix('.weight')}"
                    delta = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
                    expected = (expected.float() + delta * (ALPHA / RANK)).to(torch.bfloat16)
                assert torch.equal(merged.get_tensor(key), expected), key


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda base, adapter, out: (out.mkdir(), (out / "mine").touch()), r"error: .*out has something in it"),
        (lambda base, adapter, out: shutil.rmtree(adapter), r"error: .*adapter_config.json not found"),
        (lambda base, adapter, out: (base / "config.json").unlink(), r"error: .*config.json not found"),
        (lambda base, adapter, out: (base / "model.safetensors").unlink(), r"error: .*model.safetensors not found"),
    ],
)
def test_merge_says_what_is_wrong(models: dict[str, Path], tmp_path: Path, change: Any, match: str) -> None:
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    shutil.copytree(models["llama"], base)
    trained_by_peft(base, adapter, target_modules=["q_proj"])
    change(base, adapter, out)
    with pytest.raises(SystemExit, match=match):
        run("merge", "--base", base, "--adapter", adapter, "--out", out)
    assert not (out / "config.json").exists()


def test_out_may_be_an_empty_directory_or_a_link_to_one(models: dict[str, Path], tmp_path: Path) -> None:
    peft_saves(models["llama"], tmp_path / "adapter", target_modules=["q_proj"])
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    arguments = ("merge", "--base", models["llama"], "--adapter", tmp_path / "adapter", "--out")
    run(*arguments, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    run(*arguments, tmp_path / "deep/er")
    names = sorted(file.name for file in models["llama"].iterdir())
    assert names == sorted(file.name for file in (tmp_path / "real").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "deep/er").iterdir())


def test_merge_holds_one_file_at_a_time(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_mcore_lora.peft import merge

    base = tmp_path / "base"
    families.reference(models["llama"]).save_pretrained(base, max_shard_size="20KB")
    peft_saves(models["llama"], tmp_path / "adapter", target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj"])
    files: list[list[weakref.ref]] = []
    original, opened = merge._merged, merge.open_safetensors

    def open_next(path: Path) -> Any:
        files.append([])
        return opened(path)

    def watch(*arguments: Any) -> Tensor:
        assert not [tensor for file in files[:-1] for tensor in file if tensor() is not None]
        files[-1].append(weakref.ref(tensor := original(*arguments)))
        return tensor

    monkeypatch.setattr(merge, "open_safetensors", open_next)
    monkeypatch.setattr(merge, "_merged", watch)
    merge.merge_directory(base, tmp_path / "adapter", tmp_path / "out")
    assert sum(bool(file) for file in files) > 2


def test_damaged_and_sparse_adapters(models: dict[str, Path], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    peft_saves(models["llama"], adapter, target_modules=["q_proj"], use_rslora=True)
    arguments = ("merge", "--base", models["llama"], "--adapter", adapter, "--out")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in ("lora_alpha", "alpha_pattern", "rank_pattern", "lora_dropout"):
        del config[name]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model = with_peft(models["llama"], adapter)  # which takes its own defaults
    run(*arguments, tmp_path / "out")
    assert relative_error(logits_of(families.reference(tmp_path / "out")), logits_of(model)) < 1e-4
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SystemExit, match=r"error: .*adapter_model.safetensors is damaged"):
        run(*arguments, tmp_path / "other")


def test_merge_of_another_models_adapter_writes_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    from lightning_mcore_lora.peft.merge import merge_directory

    wide = families.write("llama", tmp_path / "wide", intermediate_size=64)
    trained_by_peft(wide, tmp_path / "adapter", target_modules=["down_proj"])
    with pytest.raises(ValueError, match=r"is \(32, 48\), the adapter is for \(32, 64\): another model\?"):
        merge_directory(models["llama"], tmp_path / "adapter", tmp_path / "out")
    trained_by_peft(models["llama"], tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(ValueError, match=r"no weight for the adapter's \['lm_head.weight'\] \(it is tied"):
        merge_directory(models["llama3 tied"], tmp_path / "head", tmp_path / "out")
    assert not (tmp_path / "out").exists()
