"""What README and docs show runs as it stands there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import moe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run(*command: str, timeout: int = 170) -> str:
    environment = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_valid_and_links_lead_somewhere(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:examples|tests|lightning_mcore_lora|docs)/[\w/.]+)", page.read_text()):
        assert (ROOT / path).exists(), path


def test_commands_are_ci_commands() -> None:
    commands = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    assert len(commands) == 2
    ci = (ROOT / ".ci/run").read_text()
    for command in commands:
        assert command.startswith("python -m pip install nox && python -m nox -s ")
        assert command.partition("&& ")[2] in ci


def test_public_names_are_documented() -> None:
    import lightning_mcore_lora

    for name in lightning_mcore_lora.__all__:
        assert getattr(lightning_mcore_lora, name).__doc__, name


@pytest.mark.pretrained
@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_first_script(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(blocks(ROOT / "README.md", "python")[0])
    output = run(sys.executable, str(script))
    assert "trainable of" in output
    assert "linear_qkv" in output


@pytest.mark.pretrained
@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_lightning_cli(tmp_path: Path) -> None:
    # At TP=3 as in the file; cut short.
    output = run(
        sys.executable,
        "examples/finetune_cli.py",
        "fit",
        "--config=examples/finetune.yaml",
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=1",
        "--data.max_samples=12",
        "--data.batch_size=2",
        "--data.max_length=160",
        f"--trainer.default_root_dir={tmp_path}",
    )
    assert "max_steps=1` reached" in output
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt/manifest.json"))


@pytest.mark.pretrained
@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_finetune_with_own_data_and_resume(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1?", "completion": f"{i + 1}"}) + "\n" for i in range(12)))
    common = [sys.executable, "examples/finetune.py", f"--data={data}", f"--out={tmp_path}/out", "--batch-size=2"]
    output = run(*common, "--regather", "--max-steps=2", "--checkpoint-every=1")
    assert "Held-out loss" in output
    assert "regather" in output
    output = run(*common, "--regather", "--max-steps=3", f"--resume={tmp_path}/out/last.ckpt")
    assert "PEFT adapter" in output


@pytest.mark.pretrained
@pytest.mark.full
def test_finetuned_answers_alike_in_peft(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 tuned at TP=3, exported: transformers with PEFT, and the merged directory, say what was said here."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    question = "What does the with statement do?"
    options = ["--max-steps=4", "--max-samples=24", "--batch-size=2", "--max-length=96", f"--question={question}"]
    output = run(sys.executable, "examples/finetune.py", *options, "--lr=1e-3", f"--out={tmp_path}/out")
    said = {when: re.search(rf"^  {when} +(.*)$", output, re.MULTILINE)[1] for when in ("before", "after")}
    assert said["before"] != said["after"], "four steps changed the answer"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    run(
        sys.executable, "-m", "lightning_mcore_lora.cli", "merge",
        f"--base={smollm2}", f"--adapter={tmp_path}/out/adapter", f"--out={tmp_path}/merged",
    )  # fmt: skip
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2), tmp_path / "out/adapter")
    for model in (adapted, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        answer = model.generate(input_ids=prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True).strip().splitlines()[0] == said["after"]


@pytest.mark.pretrained
@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_killed_fine_tune_goes_on_with_the_documented_command(tmp_path: Path) -> None:
    documented = blocks(ROOT / "docs/checkpoints.md", "bash")[0].strip()
    assert documented.startswith("python -m nox -s demo -- "), "which gives the rest to examples/finetune.py"
    resume = documented.partition(" -- ")[2].split()
    options = ["--max-samples=12", "--batch-size=2", "--max-length=96", "--checkpoint-every=1"]
    command = [sys.executable, "examples/finetune.py", *options]
    straight = run(*command, f"--out={tmp_path}/straight", timeout=300)
    out = tmp_path / "killed"
    process = subprocess.Popen([*command, f"--out={out}"], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (step := saved_step(out / "last.ckpt")) or step < 2:
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = run(*command, f"--out={out}", *resume, timeout=300)
    assert "Restored all states" in resumed
    assert re.findall("Held-out .*", straight) == re.findall("Held-out .*", resumed)


def saved_step(checkpoint: Path) -> int | None:
    try:
        return json.loads((checkpoint / "manifest.json").read_text())["step"]
    except FileNotFoundError:
        return None


@pytest.mark.pretrained
@pytest.mark.full
def test_finetune_a_mixture_of_experts(smollm2: Path, tmp_path: Path) -> None:
    """The command of docs/experts.md, on a tiny model with SmolLM2's tokenizer."""
    command = blocks(ROOT / "docs/experts.md", "bash")[0].split()
    model = tiny_mixture(smollm2, tmp_path / "model")
    command[command.index("--model") + 1] = str(model)
    short = ["--max-steps=2", "--max-samples=12", "--batch-size=2", "--max-length=96", f"--out={tmp_path}/out"]
    output = run(sys.executable, *command[1:], *short)
    assert "mlp.experts.linear_fc1" in output
    assert "Held-out loss" in output
    logged = next((tmp_path / "out/log").glob("version_*/metrics.csv")).read_text()
    assert logged.startswith("epoch")


def tiny_mixture(smollm2: Path, directory: Path) -> Path:
    """A tiny Qwen3-MoE with random weights that reads SmolLM2's tokens."""
    moe.Model().write(directory, vocab_size=49152)
    for file in smollm2.glob("*token*"):
        shutil.copy(file, directory)
    for name in ("vocab.json", "merges.txt", "chat_template.jinja"):
        if (smollm2 / name).is_file():
            shutil.copy(smollm2 / name, directory)
    return directory


@pytest.mark.pretrained
@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_finetune_in_fabric_gives_the_trainers_numbers(tmp_path: Path) -> None:
    options = ["--max-steps=1", "--max-samples=12", "--batch-size=2", "--max-length=96", f"--out={tmp_path}"]
    output = run(sys.executable, "examples/finetune_fabric.py", *options)
    found = re.findall(r"Held-out loss .*", output)
    assert len(found) == 1
    assert found == re.findall(r"Held-out loss .*", run(sys.executable, "examples/finetune.py", *options))
    longer = ["--max-steps=2", f"--resume={tmp_path}/last.ckpt", *options[1:]]
    assert "Held-out loss" in run(sys.executable, "examples/finetune_fabric.py", *longer)


@pytest.mark.pretrained
@pytest.mark.full
@pytest.mark.usefixtures("smollm2")
def test_finetune_explains_a_bad_line(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 1}\n')
    with pytest.raises(AssertionError, match=r"error: .*bad.jsonl, line 2: got the keys \['prompt'\]; expected"):
        run(sys.executable, "examples/finetune.py", f"--data={data}", f"--out={tmp_path}/out")
