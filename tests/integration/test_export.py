"""From a Trainer's checkpoint to PEFT and to merged directories, by the command line; and back into a Trainer."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from lightning_mcore_lora import cli
from tests import families, peft_runs
from tests.integration.test_families import ALPHA, RANK, logits_of, trained_by_peft, with_peft
from tests.integration.test_merge import run
from tests.integration.test_peft import DENSE
from tests.oracle import relative_error
from tests.workers import WorkerPool


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {"modules_to_save": ("final_layernorm", "word_embeddings", "output_layer")}),
        ("qwen2", {"dora": True, "canonical": True}),
        pytest.param("gpt_oss", {"target_modules": (*DENSE, "router")}, marks=pytest.mark.full),
        pytest.param("llama3 tied", {"dtype": "bfloat16", "layers_to_transform": (0,)}, marks=pytest.mark.full),
    ],
)
def test_export_is_what_the_run_would_save(
    workers: WorkerPool, tmp_path: Path, name: str, lora: dict[str, Any]
) -> None:
    directory = families.write(name, tmp_path / "base")
    lora = {"rank": RANK, "alpha": ALPHA, "target_modules": DENSE} | lora
    checkpoint, live, out = tmp_path / "run.ckpt", tmp_path / "live", tmp_path / "exported"
    logits = workers(2, peft_runs.fit, str(directory), families.layouts(name)[0], str(checkpoint), lora, str(live))[0]
    run("export", "--checkpoint", checkpoint, "--out", out)
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (live, out))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (live, out)]
    assert configs[0].pop("base_model_name_or_path") == str(directory)
    assert configs[1].pop("base_model_name_or_path") == "base"
    assert configs[0] == configs[1]
    assert relative_error(logits_of(with_peft(directory, out)), logits) < 1e-4
    run("merge", "--base", directory, "--adapter", checkpoint, "--out", tmp_path / "merged")
    assert relative_error(logits_of(families.reference(tmp_path / "merged")), logits) < 1e-4


def test_expert_dora_is_merged_from_a_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    """PEFT cannot hold it: the message names this way."""
    directory = families.write("qwen3_moe", tmp_path / "base")
    lora = {"rank": RANK, "alpha": ALPHA, "dora": True}
    checkpoint = tmp_path / "run.ckpt"
    logits = workers(2, peft_runs.fit, str(directory), (2, 2, 1), str(checkpoint), lora, None)[0]
    with pytest.raises(SystemExit, match=r"error: PEFT cannot hold DoRA .* merge --adapter CHECKPOINT"):
        run("export", "--checkpoint", checkpoint, "--out", tmp_path / "out")
    run("merge", "--base", directory, "--adapter", checkpoint, "--out", tmp_path / "merged")
    assert relative_error(logits_of(families.reference(tmp_path / "merged")), logits) < 1e-4


def test_a_trainer_goes_on_from_peft(workers: WorkerPool, tmp_path: Path) -> None:
    """In configure_model, without a callback: three steps here equal three of PEFT's."""
    directory = families.write("llama", tmp_path / "base")
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], "modules_to_save": ["model.norm"]}
    model, _ = trained_by_peft(directory, tmp_path / "adapter", **settings)
    model.train()
    families.train(model, families.loss_of, 3)
    arguments = (str(directory), (2, 1, 2), str(tmp_path / "run.ckpt"), None, str(tmp_path / "on"))
    logits = workers(2, peft_runs.fit, *arguments, str(tmp_path / "adapter"))[0]
    assert relative_error(logits, logits_of(model)) < 1e-4
    run("export", "--checkpoint", tmp_path / "run.ckpt", "--out", tmp_path / "out")
    assert relative_error(logits_of(with_peft(directory, tmp_path / "out")), logits) < 1e-4


def test_a_checkpoint_without_a_base_says_so(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "data/mcore-0.16.1.ckpt"
    with pytest.raises(SystemExit, match=r"error: .* does not say which Hugging Face model it is of: give base=DIR"):
        run("export", "--checkpoint", golden, "--out", tmp_path / "out")
    with pytest.raises(SystemExit, match=r"error: .* it has no manifest.json"):
        run("export", "--checkpoint", tmp_path, "--out", tmp_path / "out")


def test_documented_commands(workers: WorkerPool, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    names = [name for name, command in cli.COMMANDS.items() if ".memory." not in command.__module__]  # other pages'
    assert [command.split()[:2] for command in commands] == [["lightning-mcore-lora", name] for name in names]
    real = {
        "model.gguf": str(families.write("llama", tmp_path / "source")),
        "model-dir": str(tmp_path / "model-dir"),
        "runs/finetune/last.ckpt": str(tmp_path / "last.ckpt"),
        "adapter": str(tmp_path / "adapter"),
        "merged": str(tmp_path / "merged"),
    }
    for command in commands:
        run(*(real.get(word, word) for word in command.split()[1:]))
        if "dequantize" in command:
            lora = {"rank": RANK, "alpha": ALPHA}
            logits = workers(
                2, peft_runs.fit, real["model-dir"], (2, 1, 2), real["runs/finetune/last.ckpt"], lora, None
            )[0]
    assert relative_error(logits_of(with_peft(tmp_path / "model-dir", tmp_path / "adapter")), logits) < 1e-4
    assert relative_error(logits_of(families.reference(tmp_path / "merged")), logits) < 1e-4


def test_the_installed_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            Path(sys.executable).with_name("lightning-mcore-lora"),
            "merge",
            f"--base={tmp_path}",
            "--adapter=a",
            "--out=b",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    message = f"error: {tmp_path}/config.json not found: a Hugging Face model directory has a config.json"
    assert done.stderr.splitlines()[-1] == message


def test_with_cuda_the_command_hides_it() -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("os.execve", side_effect=SystemExit) as execve,
        pytest.raises(SystemExit),
    ):
        cli.main(["export", "--help"])
    _, command, environment = execve.call_args.args
    assert command[1:] == ["-m", "lightning_mcore_lora.cli", "export", "--help"]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
