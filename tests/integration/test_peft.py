"""PEFT's format in every variant, merging, and the command line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import families, peft_runs
from tests.integration.test_families import ALPHA, ATTENTION, RANK, logits_of, trained_by_peft, with_peft
from tests.oracle import relative_error
from tests.workers import WorkerError, WorkerPool

DENSE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("llama", {"rslora": True}),
    "dora": ("qwen2", {"dora": True}),
    "canonical": ("qwen3", {"canonical": True}),
    "canonical dora": ("llama", {"canonical": True, "dora": True}),
    "some layers": ("llama", {"layers_to_transform": (1,)}),
    "left out": ("llama", {"exclude_modules": ("*.layers.0.*.linear_fc1",)}),
    "patterns": (
        "qwen2",
        {"rank_pattern": {"linear_qkv": 6, "*.layers.1.*.linear_fc2": 2}, "alpha_pattern": {"linear_fc1": 9.0}},
    ),
    "output layer": ("llama", {"target_modules": ("linear_qkv", "output_layer")}),
    "in full": ("qwen2", {"modules_to_save": ("final_layernorm", "output_layer", "input_layernorm")}),
    "embedding in full": ("llama3 tied", {"modules_to_save": ("word_embeddings",)}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "shared experts' factors": ("qwen3_moe", {"expert_adapters": "shared"}),
    "shared outer": ("mixtral", {"expert_adapters": "shared_outer"}),
    "canonical experts": ("qwen2_moe", {"canonical": True}),
    "canonical packed": ("gpt_oss", {"canonical": True}),
    "experts' rank": (
        "qwen3_moe",
        {"rank_pattern": {"experts.linear_fc1": 6, "router": 3}, "target_modules": (*DENSE, "router")},
    ),
    "bfloat16 experts' rank": (
        "qwen3_moe",
        {"rank_pattern": {"experts.linear_fc1": 3}, "alpha_pattern": {"experts.linear_fc2": 5.0}, "dtype": "bfloat16"},
    ),
    "normalized rank": ("mixtral", {"normalize_expert_rank": True}),
    "rslora of experts": ("qwen3_moe", {"rslora": True, "canonical": True}),
}


#: What another row shows in part.
REST = (
    "canonical dora",
    "some layers",
    "left out",
    "output layer",
    "bfloat16",
    "shared outer",
    "canonical experts",
    "experts' rank",
    "normalized rank",
    "rslora of experts",
)


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.full] if v in REST else []) for v in VARIANTS])
def test_variants_answer_alike_in_peft(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    name, changes = VARIANTS[variant]
    lora = {"rank": RANK, "alpha": ALPHA, "target_modules": DENSE} | changes
    layout, directory, out = families.layouts(name)[0], models[name], tmp_path / "adapter"
    logits = workers(2, peft_runs.train_and_save, str(directory), layout, str(out), lora)[0]
    assert relative_error(logits, logits_of(families.reference(directory))) > 1e-2
    assert relative_error(logits_of(with_peft(directory, out)), logits) < 1e-4
    again = workers(1, peft_runs.load, str(directory), (1, 1, 1), str(out), str(tmp_path))[0]
    assert relative_error(again, logits) < 1e-4, "it comes in again, at another layout"
    if "canonical" not in changes or name not in families.MIXTURES:
        before, after = (load_file(folder / "adapter_model.safetensors") for folder in (out, tmp_path / "again"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key].float(), after[key].float()) for key in before)


def test_targets_are_last_names(workers: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    lora = {"rank": RANK, "target_modules": DENSE, "exclude_modules": ("*.layers.0.*.linear_fc1",)}
    workers(2, peft_runs.train_and_save, str(models["llama"]), (2, 1, 2), str(tmp_path), lora)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted([*ATTENTION, "gate_proj", "up_proj", "down_proj"])
    assert config["exclude_modules"] == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert config["base_model_name_or_path"] == str(models["llama"])
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (RANK, {}, {})


# -- from PEFT -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj"], "use_rslora": True},
        {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"], "use_dora": True},
        {"target_modules": ["o_proj", "down_proj"], "rank_pattern": {"down_proj": 6}, "alpha_pattern": {"o_proj": 3.0}},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["model.norm"]},
        {"target_modules": ["k_proj"], "layers_to_transform": [1]},
    ],
    ids=["q and v", "without up", "dora", "patterns", "head and norm", "one layer"],
)
def test_what_peft_trained_goes_on(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    directory, adapter = models["llama"], tmp_path / "adapter"
    model, gradients = trained_by_peft(directory, adapter, **settings)
    logits = workers(2, peft_runs.load, str(directory), (2, 1, 2), str(adapter), str(tmp_path))[0]
    assert relative_error(logits, logits_of(model)) < 1e-4
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "again"))
    before = {key: value for key, value in before.items() if ".base_layer." not in key}  # PEFT's copy of the base's
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    found = load_file(tmp_path / "gradients/adapter_model.safetensors")
    for key, value in found.items():
        if ".lora_" in key:
            assert relative_error(value, gradients[key.removesuffix(".weight")]) < 2e-5, key


def test_what_is_not_adapted_stays_so(workers: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    """After q and v from PEFT, training does not begin to change k."""
    trained_by_peft(models["llama"], tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    keys = workers(2, _trained_on, str(models["llama"]), str(tmp_path / "adapter"), str(tmp_path / "on"))[0]
    assert keys == load_file(tmp_path / "adapter/adapter_model.safetensors").keys()


def _trained_on(directory: str, adapter: str, out: str) -> Any:
    from lightning_mcore_lora import load_peft_adapter, save_peft_adapter

    model = peft_runs.build(directory, (2, 1, 2))
    load_peft_adapter(model, adapter)
    families.train(model, peft_runs.loss_of, 2, first=families.STEPS)
    save_peft_adapter(model, out)
    return set(load_file(Path(out) / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("settings", "lora", "match"),
    [
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj"]},
            {"target_modules": ("linear_qkv",)},
            r"have different A, and both are in .*linear_qkv.* LoRAConfig\(canonical=True\)",
        ),
        (
            {"target_modules": ["q_proj"]},
            {"target_modules": ("linear_qkv",)},
            r"q_proj.weight has an adapter and .*k_proj.weight has none.* LoRAConfig\(canonical=True\)",
        ),
        (
            {"target_modules": ["o_proj"]},
            {"target_modules": ("linear_fc2",)},
            "the model has no adapter at .*linear_proj",
        ),
        (
            {"target_modules": ["o_proj"]},
            {"target_modules": ("linear_proj", "linear_fc2")},
            "says nothing of .*linear_fc2",
        ),
        (
            {"target_modules": ["o_proj"]},
            {"target_modules": ("linear_proj",), "rank": 8},
            "rank=8 and scale=0.75, the adapter",
        ),
        ({"target_modules": ["o_proj"], "use_dora": True}, {"target_modules": ("linear_proj",)}, "dora=True: set it"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj"], "rank_pattern": {"k_proj": 8}},
            None,
            r"linear_qkv holds linears whose \(rank, alpha\) differ, \[\(4, 6.0\), \(8, 6.0\)\]",
        ),
        ({"target_modules": ["q_proj"], "use_dora": True}, None, "DoRA would train the magnitude of both"),
        ({"target_modules": ["o_proj"], "lora_bias": True}, None, "lora_bias=True in .* not supported"),
        ({"target_modules": ["embed_tokens"]}, None, "lora_embedding_A is not supported"),
        (
            {"target_modules": ["o_proj"], "init_lora_weights": "pissa"},
            None,
            "init_lora_weights='pissa'.*changed the base",
        ),
    ],
)
def test_what_cannot_come_in_is_said(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, settings: dict[str, Any], lora: Any, match: str
) -> None:
    trained_by_peft(models["llama"], tmp_path / "adapter", **settings)
    settings_here = None if lora is None else {"rank": RANK, "alpha": ALPHA} | lora
    with pytest.raises(WorkerError, match=match):
        workers(2, peft_runs.load, str(models["llama"]), (2, 1, 2), str(tmp_path / "adapter"), None, settings_here)


def peft_saves(directory: Path, out: Path, change: Any = None, save: Any = None, **settings: Any) -> Any:
    """A model with an adapter of PEFT's with random factors; nothing is trained."""
    from peft import LoraConfig, get_peft_model

    base = families.reference(directory)
    if change is not None:
        change(base)
    torch.manual_seed(4)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(out, **(save or {}))
    return model


def _resize(model: Any) -> None:
    model.resize_token_embeddings(families.VOCAB + 3)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        # PEFT trains a copy, and the output layer stays: what it warns of itself
        ("llama3 tied", {"modules_to_save": ["embed_tokens"]}, "ensure_weight_tying=True, or untie the base"),
        ("llama3 tied", {"modules_to_save": ["lm_head"]}, "an output layer trained in full.* untie the base"),
        ("llama", {"modules_to_save": ["embed_tokens"], "change": _resize}, "has 100 rows, the base vocab_size=97"),
        ("llama", {"change": _resize, "save": {"save_embedding_layers": True}}, "has 100 rows, the base vocab_size=97"),
        (
            "llama",
            {
                "change": lambda model: model.lm_head.weight.data.add_(1.0),
                "save": {"save_embedding_layers": True},
            },
            "was changed before",
        ),
    ],
)
def test_ends_that_the_base_does_not_have_are_refused(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str, settings: dict[str, Any], match: str
) -> None:
    from lightning_mcore_lora.peft.merge import merge_directory

    peft_saves(models[name], tmp_path / "adapter", target_modules=["q_proj"], **settings)
    with pytest.raises(WorkerError, match=match):
        workers(2, peft_runs.load, str(models[name]), (2, 1, 2), str(tmp_path / "adapter"), None)
    with pytest.raises(ValueError, match=match):
        merge_directory(models[name], tmp_path / "adapter", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("name", ["llama", "llama3 tied"])
def test_copies_of_the_base_stay_frozen(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    model = peft_saves(
        models[name], tmp_path / "adapter", target_modules=["q_proj"], save={"save_embedding_layers": True}
    )
    assert "base_model.model.model.embed_tokens.weight" in load_file(tmp_path / "adapter/adapter_model.safetensors")
    logits = workers(2, peft_runs.load, str(models[name]), (2, 1, 2), str(tmp_path / "adapter"), str(tmp_path))[0]
    assert relative_error(logits, logits_of(model)) < 1e-4
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert config["modules_to_save"] is None


def _second_adapter(directory: str, first: str, second: str) -> None:
    from lightning_mcore_lora import load_peft_adapter

    model = peft_runs.build(directory, (2, 1, 2))
    load_peft_adapter(model, first)
    load_peft_adapter(model, second)


def test_a_second_adapter_leaves_nothing_of_the_first(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path
) -> None:
    directory, first, second = str(models["llama"]), str(tmp_path / "first"), str(tmp_path / "second")
    peft_saves(models["llama"], Path(first), target_modules=["q_proj"], modules_to_save=["model.norm"])
    peft_saves(models["llama"], Path(second), target_modules=["q_proj"])
    workers(2, _second_adapter, directory, second, second)
    with pytest.raises(WorkerError, match=r"final_layernorm.weight'\] train in full here, and the adapter has nothing"):
        workers(2, _second_adapter, directory, first, second)


def _merged_refuses(directory: str, adapter: str) -> None:
    from lightning_mcore_lora import load_checkpoint, load_peft_adapter, merge_lora, unmerge_lora

    model = peft_runs.build(directory, (2, 1, 2))
    load_peft_adapter(model, adapter)
    merge_lora(model)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"merged into the base: unmerge_lora\(model\) first"):
        load_peft_adapter(model, adapter)
    with pytest.raises(ValueError, match=r"merged into the base: unmerge_lora\(model\) first"):
        load_checkpoint(model, "tests/data/mcore-0.16.1.ckpt")
    with pytest.raises(RuntimeError, match=r"unmerge_lora\(model\) before training"):
        peft_runs.loss_of(model, families.tokens())
    unmerge_lora(model)
    load_peft_adapter(model, adapter)
    with torch.autocast("cpu", torch.bfloat16):
        merge_lora(model)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters()), "in float32 under autocast too"


def test_a_merged_model_takes_nothing_in(workers: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    peft_saves(models["llama"], tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    workers(2, _merged_refuses, str(models["llama"]), str(tmp_path / "adapter"))


def test_an_adapter_of_another_model_is_refused(workers: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    directory = families.write("llama", tmp_path / "wide", intermediate_size=64)
    trained_by_peft(directory, tmp_path / "adapter", target_modules=["down_proj"])
    refusal = workers(2, _refused, str(models["llama"]), str(tmp_path / "adapter"))[0]
    assert re.search(r"A of .*linear_fc2 is \(4, 48\), the adapter's is \(4, 64\): another model\?", refusal)
    with pytest.raises(WorkerError, match=r"adapter_config.json not found"):
        workers(2, peft_runs.load, str(models["llama"]), (2, 1, 2), str(tmp_path / "nothing"), str(tmp_path))


def _refused(directory: str, adapter: str) -> str:
    """The refusal, after which the model is as it was."""
    from lightning_mcore_lora import load_peft_adapter

    model = peft_runs.build(directory, (2, 1, 2))
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="another model") as refusal:
        load_peft_adapter(model, adapter)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    return str(refusal.value)


# -- what PEFT cannot hold, and vLLM's rules -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lora", "save", "match"),
    [
        ("qwen3_moe", {"dora": True}, {}, r"PEFT cannot hold DoRA of .*experts.*merge --adapter CHECKPOINT"),
        ("llama", {"dora": True}, {"for_vllm": True}, "vLLM reads no DoRA: merge it instead"),
        ("llama", {"modules_to_save": ("final_layernorm",)}, {"for_vllm": True}, "no modules trained in full"),
        ("mixtral", {"target_modules": ("router", "linear_qkv")}, {"for_vllm": True}, "vLLM adapts no routers"),
        ("llama", {"rank": 520}, {"for_vllm": True}, "rank=520 is over vLLM's limit, --max-lora-rank=512"),
        (
            "qwen3_moe",
            {"modules_to_save": ("local_experts.0",), "target_modules": ("linear_qkv",)},
            {},
            "has no place in an adapter",
        ),
        (
            "gpt_oss",
            {"modules_to_save": ("core_attention",)},
            {},
            r"PEFT cannot hold .*sinks in full.* merge --adapter",
        ),
    ],
)
def test_what_cannot_go_out_is_said(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str, lora: Any, save: Any, match: str
) -> None:
    lora = {"rank": RANK, "target_modules": DENSE} | lora
    with pytest.raises(WorkerError, match=match):
        workers(2, peft_runs.train_and_save, str(models[name]), families.layouts(name)[0], str(tmp_path), lora, **save)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_for_vllm(workers: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Every linear under its name on disk, one rank and one alpha: as vLLM reads it the weights are the same."""
    directory, out = models[name], tmp_path / "vllm"
    lora = {"rank": RANK, "alpha": ALPHA, "target_modules": DENSE, "rank_pattern": {"linear_fc2": 2}}
    layout = families.layouts(name)[0]
    logits = workers(2, peft_runs.train_and_save, str(directory), layout, str(out), lora, for_vllm=True)[0]
    config = json.loads((out / "adapter_config.json").read_text())
    assert not config["rank_pattern"]
    assert not config["alpha_pattern"]
    expected = as_vllm_reads(directory, out)
    model = families.reference(directory)
    disk = load_file(directory / "model.safetensors")
    assert expected.keys() <= disk.keys()
    assert len(expected) >= 2 * 7 - 2 * (name == "gpt_oss")
    save_file({**disk, **expected}, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(directory / "config.json", tmp_path)
    model = families.reference(tmp_path)
    assert relative_error(logits_of(model), logits) < 1e-4
    again = workers(1, peft_runs.load, str(directory), (1, 1, 1), str(out), str(tmp_path))[0]
    assert relative_error(again, logits) < 1e-4, "that form comes in again too"


def as_vllm_reads(directory: Path, adapter: Path) -> dict[str, Tensor]:
    """Merged weights by tensor on disk, by vLLM's reading: the name, r and lora_alpha, and nothing else."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors, disk = load_file(adapter / "adapter_model.safetensors"), load_file(directory / "model.safetensors")
    merged = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[key.replace("lora_A", "lora_B")]
        assert b.shape[1] == a.shape[0]
        if module.endswith(("experts", "experts.base_layer")):  # all experts in one, gate and up inside
            name = module.removesuffix(".base_layer") + (
                ".gate_up_proj" if module.endswith("base_layer") else ".down_proj"
            )
            experts = disk[name].shape[0]
            a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
            merged[name] = disk[name] + scale * torch.einsum("ore,eri->eio", b, a)
        else:
            assert module.split(".")[-1] in config["target_modules"]
            merged[f"{module}.weight"] = disk[f"{module}.weight"] + scale * b @ a
    return merged
