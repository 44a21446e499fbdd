"""Hugging Face directories: what is read, how much of it, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_mcore_lora.models.hf_config import read_hf_config
from lightning_mcore_lora.models.layouts import Shard, qkv
from tests import moe, tiny
from tests.workers import WorkerError, WorkerPool


def changed(tiny_llama: Path, folder: Path, **settings: Any) -> Path:
    """A copy of the tiny Llama with other settings."""
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"model_type": "mamba"},
            r"model_type='mamba' .* not supported; supported: \['gpt_oss', 'llama', 'mistral', .*'qwen3_moe'\]",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* not supported for model_type='llama'; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias=True with mlp_bias=False .* every linear or on none"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}}, "attention_factor=2.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method='mxfp4' .*lightning-mcore-lora dequantize"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1, "num_experts_per_tok": 2}, "router_jitter_noise=0.1"),
        ({"model_type": "gpt_oss", "attention_bias": True, "swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "linear_attention"],
            },
            r"layer_types has \['linear_attention'\]",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "mamba"]}, r"layer_types has \['mamba'\]"),
    ],
)
def test_what_is_not_supported_is_named(tiny_llama: Path, tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(NotImplementedError, match=match):
        read_hf_config(changed(tiny_llama, tmp_path / "model", **settings))


def test_config_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    hf = read_hf_config(tiny_llama)
    assert hf.transformer["kv_channels"] == tiny.HEAD_DIM
    assert hf.transformer["num_query_groups"] == tiny.KV_HEADS
    assert (hf.vocab_size, hf.max_sequence_length, hf.tied) == (tiny.VOCAB, 64, False)
    # transformers 4 wrote the base of the rotary embedding elsewhere
    old = changed(tiny_llama, tmp_path / "old", rope_parameters=None, rope_theta=5000.0)
    assert read_hf_config(old).rope.base == 5000.0
    with pytest.raises(ValueError, match=r"rope_type='llama3' needs the setting 'factor'"):
        read_hf_config(changed(tiny_llama, tmp_path / "less", rope_parameters={"rope_type": "llama3"}))
    with pytest.raises(FileNotFoundError, match=r"config.json not found"):
        read_hf_config(tmp_path)


class Counting:
    """A tensor that counts what is read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.read = tensor, tuple(tensor.shape), 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_rank_reads_only_what_it_keeps(size: int) -> None:
    whole = {
        name: torch.randn(rows, tiny.HIDDEN, generator=torch.Generator().manual_seed(rows + i))
        for i, (name, rows) in enumerate(tiny.OUTPUTS["linear_qkv"].items())
    }
    parts = []
    for rank in range(size):
        sources = [Counting(tensor) for tensor in whole.values()]
        parts.append(qkv.cut(sources, Shard(rank, size, tiny.KV_HEADS)))  # type: ignore[arg-type]
        assert sum(source.read for source in sources) == parts[-1].numel()
    assert torch.equal(torch.cat(parts), tiny.fuse_rows("linear_qkv", whole))


def _logits(directory: str, tp: int) -> torch.Tensor:
    from lightning_mcore_lora import build_gpt_model, cpu_backend, load_hf_weights
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, tp > 1, 1, tp))
    seeding.seed_for_init()
    model = build_gpt_model(directory, parallel)
    load_hf_weights(model, directory, parallel)
    ids = tiny.tokens()[:2, :-1].contiguous()
    with torch.no_grad():
        return model(ids, torch.arange(ids.shape[1])[None].expand_as(ids), None)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(workers: WorkerPool, tiny_llama: Path, tmp_path: Path, tp: int, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    directory = tiny_llama
    if tied:
        directory = changed(tiny_llama, tmp_path / "tied", tie_word_embeddings=True)
        tensors = load_file(directory / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(directory)(tiny.tokens()[:2, :-1]).logits
    logits = torch.cat(workers(tp, _logits, str(directory), tp), dim=-1)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("tp", "settings", "match"),
    [
        (4, {}, r"num_query_groups \(key-value heads\)=6 is not divisible by tensor_parallel_size=4. Choose a"),
        (2, {"num_attention_heads": 9, "num_key_value_heads": 3}, "num_attention_heads=9 is not divisible by"),
        (2, {"intermediate_size": 97}, "ffn_hidden_size=97 is not divisible by"),
    ],
)
def test_what_cannot_be_split_is_refused(
    workers: WorkerPool, tiny_llama: Path, tmp_path: Path, tp: int, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(WorkerError, match=match):
        workers(tp, _logits, str(changed(tiny_llama, tmp_path / "model", **settings)), tp)


def test_index_files(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "sharded", max_shard_size="60KB")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    one, other = (workers(2, _logits, str(folder), 2) for folder in (tiny_llama, directory))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WorkerError, match=r"points outside its folder: '../elsewhere.safetensors'"):
        workers(1, _logits, str(directory), 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks the tensors \['model.layers.1.mlp.up_proj.weight'\]",
        ),
        (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), r"no place for: \['model.layers.0.extra'\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"decoder.final_layernorm.weight is \(48,\) on this rank, but .* give \(7,\)",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.ones(90, tiny.HIDDEN)}),
            r"model.embed_tokens.weight of .* has 90 rows, and its config says vocab_size=96",
        ),
    ],
    ids=["missing", "left over", "shape", "vocabulary"],
)
def test_tensors_that_do_not_fit(
    workers: WorkerPool, tiny_llama: Path, tmp_path: Path, change: Any, match: str
) -> None:
    directory = changed(tiny_llama, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkerError, match=match):
        workers(1, _logits, str(directory), 1)


def test_a_tied_model_with_another_head_is_refused(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    directory = changed(tiny_llama, tmp_path / "model", tie_word_embeddings=True)
    with pytest.raises(WorkerError, match=r"tie_word_embeddings=true and an lm_head.weight that is not the embedding"):
        workers(2, _logits, str(directory), 2)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    workers(2, _logits, str(directory), 2)


def _sequence_of(directory: str, length: int) -> None:
    from lightning_mcore_lora import build_gpt_model, cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(2, 2, True, 1, 2))
    seeding.seed_for_init()
    ids = torch.zeros(1, length, dtype=torch.long)
    build_gpt_model(directory, parallel)(ids, ids, None)


def test_odd_sequence_is_refused_before_any_collective(workers: WorkerPool, tiny_llama: Path) -> None:
    workers(2, _sequence_of, str(tiny_llama), 6)
    with pytest.raises(WorkerError, match="sequence length=7 is not divisible by tensor_parallel_size=2"):
        workers(2, _sequence_of, str(tiny_llama), 7)


def _generate(directory: str, tp: int, prompt: list[int]) -> list[int]:
    from lightning_mcore_lora import build_gpt_model, cpu_backend, generate, load_hf_weights
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    with cpu_backend.active():
        parallel = ParallelContext.create(ParallelSizes(tp, tp, tp > 1, 1, tp))
        seeding.seed_for_init()
        model = build_gpt_model(directory, parallel)
        load_hf_weights(model, directory, parallel)
    tokens = generate(model, prompt, parallel, max_new_tokens=6)  # the backend is down, as after a fit
    assert model.training
    stop = tokens[2]
    assert generate(model, prompt, parallel, max_new_tokens=6, stop_tokens=[stop]) == tokens[: tokens.index(stop)]
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, [], parallel)
    return tokens


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_greedy_generation_equals_transformers(workers: WorkerPool, tiny_llama: Path, tp: int) -> None:
    from transformers import LlamaForCausalLM

    prompt = [5, 17, 3, 80, 41]
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert workers(tp, _generate, str(tiny_llama), tp, prompt) == [expected[0, len(prompt) :].tolist()] * tp


# -- mixtures of experts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny Qwen3-MoE whose first layer is dense."""
    return moe.Model(dense=(0,)).write(tmp_path_factory.mktemp("tiny-moe"))


def test_mixture_config_is_read(tiny_moe: Path, tmp_path: Path) -> None:
    fields = read_hf_config(tiny_moe).transformer
    assert fields["kv_channels"] == moe.HEAD_DIM != moe.HIDDEN // moe.HEADS
    assert fields["qk_layernorm"]
    assert fields["moe_layer_freq"] == [0, 1]
    assert (fields["ffn_hidden_size"], fields["moe_ffn_hidden_size"]) == (moe.DENSE_FFN, moe.FFN)
    assert (fields["num_moe_experts"], fields["moe_router_topk"]) == (4, moe.TOP_K)
    assert not fields["moe_router_pre_softmax"]
    assert fields["moe_aux_loss_coeff"] == 0.0, "as in transformers, unless router logits are asked for"
    asked = changed(tiny_moe, tmp_path / "asked", output_router_logits=True, router_aux_loss_coef=0.01)
    assert read_hf_config(asked).transformer["moe_aux_loss_coeff"] == 0.01
    every = changed(tiny_moe, tmp_path / "every", mlp_only_layers=[], decoder_sparse_step=1)
    assert read_hf_config(every).transformer["moe_layer_freq"] == 1
    second = changed(tiny_moe, tmp_path / "second", mlp_only_layers=[], decoder_sparse_step=2)
    assert read_hf_config(second).transformer["moe_layer_freq"] == [0, 1]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True .* not supported for model_type='qwen3_moe'"),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_what_a_mixture_cannot_is_named(tiny_moe: Path, tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(NotImplementedError, match=match):
        read_hf_config(changed(tiny_moe, tmp_path / "model", **settings))


def _load_moe(directory: str) -> str | None:
    from lightning_mcore_lora import build_gpt_model, cpu_backend, load_hf_weights
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(2, 2, True, 2, 1))
    seeding.seed_for_init()
    model = build_gpt_model(directory, parallel)
    try:
        load_hf_weights(model, directory, parallel)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: None, None),
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "lacks the tensors .*experts.3.up_proj"),
        (lambda t: t.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.ones(1)}), "no place for: .*ts.4.up"),
        (lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(1)}), "no place for: .*layers.1.mlp.up_"),
        (lambda t: [t.pop(name) for name in list(t) if "q_norm" in name], "lacks the tensors .*q_norm"),
    ],
    ids=["all there", "missing", "left over", "dense where the model is a mixture", "no norms of queries"],
)
def test_expert_tensors_are_checked_on_every_rank(
    workers: WorkerPool, tiny_moe: Path, tmp_path: Path, change: Any, match: str | None
) -> None:
    directory = changed(tiny_moe, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for said in workers(2, _load_moe, str(directory)):
        assert (said is None) == (match is None)
        assert match is None or re.search(match, said)
