"""Every family: base models equal transformers', adapters go out to PEFT and come in from it, unchanged."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import families, peft_runs
from tests.oracle import relative_error
from tests.workers import WorkerPool

LAYOUTS = [
    pytest.param(name, layout, id=f"{name}-{layout}", marks=[pytest.mark.full] if i else [])
    for name in families.MODELS
    for i, layout in enumerate(families.layouts(name))
]
BOUND = 1e-4
RANK, ALPHA = 4, 6.0
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def with_peft(directory: Path, adapter: Path) -> Any:
    """transformers' model with the adapter, loaded without a warning."""
    from peft import PeftModel

    base = families.reference(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # transformers' own, of a name that PEFT still calls
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model.eval()(families.tokens()[:, :-1]).logits


@pytest.mark.parametrize(
    ("name", "layout"), [*[pytest.param(n, (1, 1, 1), id=f"{n}-1") for n in families.MODELS], *LAYOUTS]
)
def test_logits_equal_transformers(
    workers: WorkerPool, models: dict[str, Path], name: str, layout: tuple[int, int, int]
) -> None:
    expected = logits_of(families.reference(models[name]))
    for logits in workers(families.world(layout), peft_runs.base_logits, str(models[name]), layout):
        assert relative_error(logits, expected) < BOUND


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
#: As other versions of transformers wrote configs: settings that change, and settings that are left out.
CONFIGS = {
    "llama, transformers 4": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
        ["rope_parameters", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias"],
    ),
    "qwen2.5 for long texts": (
        "qwen2",
        {
            "rope_scaling": {"type": "yarn", **YARN},
            "rope_theta": 1e6,
            "use_sliding_window": False,
            "sliding_window": 131072,
        },
        ["rope_parameters", "layer_types"],
    ),
    "qwen2, windows by number": ("qwen2", {"use_sliding_window": True, "sliding_window": 5}, ["layer_types"]),
    "qwen3, scales": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2, **YARN}},
        [],
    ),
    "qwen3, attention factor": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 1.1386294361119891, **YARN}},
        [],
    ),
    "mistral, all left out": ("mistral", {}, ["sliding_window", "rope_parameters", "rms_norm_eps"]),
    "mistral without a window": ("mistral", {"sliding_window": None}, []),
    "mixtral, all left out": ("mixtral", {}, ["rope_parameters", "rms_norm_eps", "sliding_window"]),
    "mixtral with a window": ("mixtral", {"sliding_window": 5}, []),
    "gpt-oss, all left out": ("gpt_oss", {}, ["rope_parameters", "layer_types", "swiglu_limit", "rms_norm_eps"]),
    "gpt-oss, transformers 4": (
        "gpt_oss",
        {
            "rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN},
            "rope_theta": 15e4,
            "initial_context_length": 16,
        },
        ["rope_parameters"],
    ),
    "llama3, length outside": (
        "llama",
        {
            "rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"rope_theta": 1e4, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 16,
        },
        [],
    ),
    "qwen2, both forms": ("qwen2", {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e4}, []),
    "llama, nothing and null": ("llama", {"attention_dropout": None}, ["hidden_act"]),
    "gpt-oss, no windows": ("gpt_oss", {"layer_types": ["full_attention", "full_attention"], "swiglu_limit": 1.0}, []),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_mean_what_they_mean_to_transformers(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, case: str
) -> None:
    name, changes, left_out = CONFIGS[case]
    directory = tmp_path / "model"
    shutil.copytree(models[name], directory)
    settings = json.loads((directory / "config.json").read_text())
    settings = {key: value for key, value in settings.items() if key not in left_out} | changes
    (directory / "config.json").write_text(json.dumps(settings))
    expected = logits_of(families.reference(directory))
    assert relative_error(workers(1, peft_runs.base_logits, str(directory), (1, 1, 1))[0], expected) < BOUND


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_trained_here_answers_alike_in_peft(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str, layout: tuple[int, int, int]
) -> None:
    targets = (
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        *(("router",) if name in families.MIXTURES else ()),
    )
    lora = {"rank": RANK, "alpha": ALPHA, "target_modules": targets}
    directory, out = models[name], tmp_path / "adapter"
    logits = workers(families.world(layout), peft_runs.train_and_save, str(directory), layout, str(out), lora)[0]
    base = logits_of(families.reference(directory))
    assert relative_error(logits, base) > 1e-2, "the adapter does something"
    assert relative_error(logits_of(with_peft(directory, out)), logits) < BOUND


def peft_targets(name: str) -> dict[str, Any]:
    if name not in families.MIXTURES:
        return {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    if name == "qwen2_moe":
        parameters += [f"mlp.shared_expert.{leaf}_proj.weight" for leaf in ("gate", "up", "down")]
    return {"target_modules": ATTENTION, "target_parameters": parameters}


def trained_by_peft(directory: Path, out: Path, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model that PEFT trained and saved, and the gradients of its next step."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = {"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"} | settings
    model = get_peft_model(families.reference(directory), LoraConfig(**config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.05)
    families.train(model, families.loss_of, families.STEPS)
    model.save_pretrained(out)
    model.zero_grad()
    families.loss_of(model, families.tokens(families.STEPS)).backward()
    gradients = {
        key.replace(".default", "").removesuffix(".weight"): parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return model, gradients


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_trained_by_peft_goes_on_here(
    workers: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str, layout: tuple[int, int, int]
) -> None:
    directory, adapter = models[name], tmp_path / "adapter"
    model, gradients = trained_by_peft(directory, adapter, **peft_targets(name))
    logits = workers(families.world(layout), peft_runs.load, str(directory), layout, str(adapter), str(tmp_path))[0]
    assert relative_error(logits, logits_of(model)) < BOUND
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before), "the round trip changes no bit"
    found = {
        key.removesuffix(".weight"): v for key, v in load_file(tmp_path / "gradients/adapter_model.safetensors").items()
    }
    assert found.keys() == gradients.keys()
    worst = {key: relative_error(found[key], gradients[key]) for key in found}
    assert max(worst.values()) < 2e-5, max(worst, key=lambda key: worst[key])
