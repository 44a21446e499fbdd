"""Plain weights from quantised ones, through transformers: GGUF files, MXFP4 and other directories."""

from pathlib import Path
from typing import Literal

import torch

from lightning_mcore_lora.models.directories import new_directory
from lightning_mcore_lora.models.loading import copy_beside_weights


def dequantize(
    model: str | Path, out: str | Path, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> Path:
    """Write a Hugging Face directory with plain safetensors and the tokenizer.

    The whole model is in memory meanwhile.

    Args:
        model: A ``.gguf`` file, or a Hugging Face directory whose quantisation transformers can undo.
        out: Directory to make.
        dtype: Of the weights.

    Returns:
        The directory.

    Raises:
        FileExistsError: If ``out`` has something in it.
        FileNotFoundError: If there is no such file or directory.
        ImportError: If transformers (or gguf) is not installed, naming what to install.
    """
    source = Path(model)
    with new_directory(out) as partial:
        if not source.exists():
            raise FileNotFoundError(f"{source} not found: give a .gguf file or a Hugging Face directory")
        try:
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ImportError("dequantize needs transformers: pip install lightning-mcore-lora[hf]") from error
        where, file = (source.parent, {"gguf_file": source.name}) if source.suffix == ".gguf" else (source, {})
        read = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **file, **_undo(source))
        # A model that was never quantised: of one that was, save_pretrained writes what says so.
        settings = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=getattr(torch, dtype))
        plain.load_state_dict(read.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = read.generation_config
        if file:
            AutoTokenizer.from_pretrained(where, **file).save_pretrained(partial)
        else:
            copy_beside_weights(source, partial)
            (partial / "model.safetensors.index.json").unlink(missing_ok=True)
        plain.save_pretrained(partial)
    return Path(out)


def _undo(source: Path) -> dict[str, object]:
    """What tells transformers to undo a quantisation that it would else keep."""
    if source.suffix == ".gguf":
        return {}
    from transformers import AutoConfig, Mxfp4Config

    quantised = getattr(AutoConfig.from_pretrained(source), "quantization_config", None) or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
    return {"quantization_config": Mxfp4Config(dequantize=True)} if str(method).endswith("mxfp4") else {}
