"""Plain weights from quantised ones. GGUF is read whenever examples/smollm2.py makes its directory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_mcore_lora import cli
from lightning_mcore_lora.models.hf_config import read_hf_config
from tests import families

#: The sixteen values of a four-bit float.
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantise(directory: Path) -> dict[str, torch.Tensor]:
    """Replace experts' weights by random MXFP4 ones, as GPT-OSS is published; what they stand for."""
    tensors = load_file(directory / "model.safetensors")
    generator, plain = torch.Generator().manual_seed(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([_VALUES[(blocks & 15).long()], _VALUES[(blocks >> 4).long()]], -1).flatten(-2)
        plain[name] = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))
    return plain


def test_mxfp4(tmp_path: Path) -> None:
    source, out = families.write("gpt_oss", tmp_path / "source", intermediate_size=64), tmp_path / "plain"
    expected = quantise(source)
    (source / "tokenizer.json").write_text("{}")
    generation = json.loads((source / "generation_config.json").read_text()) | {
        "eos_token_id": [5, 7],
        "do_sample": True,
    }
    (source / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(NotImplementedError, match=r"quant_method='mxfp4' .*lightning-mcore-lora dequantize"):
        read_hf_config(source)
    cli.main(["dequantize", "--model", str(source), "--out", str(out)])
    assert read_hf_config(out).transformer["num_moe_experts"] == 4
    assert (out / "tokenizer.json").is_file()
    written = json.loads((out / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["do_sample"]) == ([5, 7], True)
    tensors, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert len(expected) == 4
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert all(torch.equal(tensors[name], before[name]) for name in tensors.keys() & before.keys())


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*none.gguf not found: give a .gguf file or a Hugging Face"):
        cli.main(["dequantize", f"--model={tmp_path}/none.gguf", f"--out={tmp_path}/out"])
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match=r"error: .* has something in it"):
        cli.main(["dequantize", f"--model={tmp_path}", f"--out={tmp_path}"])
    with pytest.raises(SystemExit):  # jsonargparse names the three
        cli.main(["dequantize", f"--model={tmp_path}", f"--out={tmp_path}/out", "--dtype=bf16"])
    (tmp_path / "model.gguf").touch()
    with pytest.raises(NotImplementedError, match=r"model.gguf holds quantised weights: .* dequantize"):
        read_hf_config(tmp_path / "model.gguf")
