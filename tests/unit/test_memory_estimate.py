"""The estimator's rules for CUDA, against published figures, and what it refuses."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore_lora import LoRAConfig, MemoryEstimate, estimate_memory, flops_per_token
from lightning_mcore_lora.cli import main
from lightning_mcore_lora.parallel import ParallelSizeError, ParallelSizes

DOCS = Path(__file__).parents[2] / "docs/memory.md"
QWEN3: dict[str, Any] = {"head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 151936, "max_position_embeddings": 40960}
#: The settings of the published models' ``config.json`` that have to do with size.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-8B": QWEN3
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "GPT-OSS-120B": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}
#: Layout, sequence length and decimal GB that re-gather saved on H100s, at a micro batch of 1.
SAVED = [
    ("Qwen3-8B", ParallelSizes(2, 2, True, 1, 2), 8192, 4.731),
    ("Qwen3-30B-A3B", ParallelSizes(4, 4, True, 4, 1), 8192, 1.569),
    ("GPT-OSS-120B", ParallelSizes(8, 2, True, 8, 1), 4096, 0.814),
]


@pytest.mark.parametrize(("model", "sizes", "sequence", "published"), SAVED)
def test_regather_saves_what_was_published(model: str, sizes: ParallelSizes, sequence: int, published: float) -> None:
    def estimate(mode: str) -> MemoryEstimate:
        return estimate_memory(PUBLISHED[model], sizes, sequence_length=sequence, lora=LoRAConfig(sequence_mode=mode))

    gather = estimate("gather")
    assert (gather.total - estimate("regather").total) / 1e9 == pytest.approx(published, rel=0.05)
    # `local` keeps what re-gather keeps, and at column-parallel sites a z of the whole rank.
    z = gather.micro_batch_size * sequence * 16 * 2 * 2 * len(gather.sites)
    assert estimate("local").total - estimate("regather").total < z


@pytest.mark.parametrize(
    ("model", "billions"), [("Qwen3-8B", 8.19), ("Qwen3-30B-A3B", 30.53), ("GPT-OSS-120B", 116.83)]
)
def test_weights_are_those_of_the_published_models(model: str, billions: float) -> None:
    estimate = estimate_memory(PUBLISHED[model], ParallelSizes(1), sequence_length=8)
    assert estimate.components["base weights"] / 2e9 == pytest.approx(billions, abs=0.005)


def test_docs_show_what_is_estimated() -> None:
    rows = re.findall(r"^\| (.*?) \| .*? \| \d+ \| ([\d.]+) GB \| ([\d.]+) GB \|", DOCS.read_text(), re.MULTILINE)
    assert [(name, float(published)) for name, published, _ in rows] == [(row[0], row[3]) for row in SAVED]
    for (model, sizes, sequence, _), (_, _, shown) in zip(SAVED, rows, strict=True):
        gather, regather = (
            estimate_memory(PUBLISHED[model], sizes, sequence_length=sequence, lora=LoRAConfig(sequence_mode=mode))
            for mode in ("gather", "regather")
        )
        assert float(shown) == round((gather.total - regather.total) / 1e9, 3)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"]))
    command = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)[0].replace("model-dir", str(tmp_path))
    arguments = shlex.split(command)[1:]
    main(arguments)
    table = capsys.readouterr().out
    main([*arguments, "--json", "true"])
    found = json.loads(capsys.readouterr().out)
    for bare in ([*arguments, "--json"], [arguments[0], "--json", *arguments[1:]]):
        main(bare)
        assert json.loads(capsys.readouterr().out) == found
    assert f"{found['total'] / 2**30:.2f} GiB" in table
    for name, count in found["components"].items():
        assert re.search(rf"{name} +{count / 2**30:.3f}", table), name
    with pytest.raises(SystemExit, match=r"'recompute' is no field of TransformerConfig; near names: .*recompute"):
        main([*arguments, "--overrides", '{"recompute": true}'])


def qwen3(**options: Any) -> MemoryEstimate:
    sizes = options.pop("sizes", ParallelSizes(2, 2, True, 1, 2))
    return estimate_memory(PUBLISHED["Qwen3-8B"], sizes, **({"sequence_length": 4096} | options))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"precision": "64"}, "precision='64' must be one of"),
        ({"optimizer": "lbfgs"}, "optimizer='lbfgs' must be one of"),
        ({"accelerator": "tpu"}, "accelerator='tpu' must be one of"),
        ({"layers": "nemo"}, "layers='nemo' must be one of"),
        ({"attention": "paged"}, "attention='paged' must be one of"),
        (
            {"attention": "flash", "precision": "32-true"},
            "attention='flash' has no float32 kernels: with precision='32-true' it is 'unfused'",
        ),
        ({"sequence_length": 0}, "sequence_length=0 must be a positive"),
        ({"micro_batch_size": 1.5}, "micro_batch_size=1.5 must be a positive"),
        ({"sequence_length": 4097}, "sequence length=4097 is not divisible"),
        ({"expert_imbalance": 0.5}, "expert_imbalance=0.5 must be at least 1"),
        (
            {"sizes": ParallelSizes(3, 3, True, 1, 3)},
            "num_attention_heads=32 is not divisible by tensor_parallel_size=3",
        ),
        ({"tensor_model_parallel_size": 4}, "follows the layout: leave it out, and set tensor_parallel_size"),
        ({"num_layers": 0}, "num_layers=0 must be a positive integer"),
        ({"num_layers": "x"}, "num_layers='x' must be a positive integer"),
        ({"recompute_num_layers": 0}, "recompute_num_layers=0 must be"),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 5},
            "recompute_num_layers=5 must divide num_layers=36",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["banana"]},
            "Megatron-Core does not take these settings: .*banana",
        ),
        ({"lora": LoRAConfig(rank=3, sequence_mode="gather")}, "rank=3 is not divisible"),
        ({"lora": LoRAConfig(target_modules=("q_proj",))}, "'q_proj' matches no linear"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], names: str) -> None:
    with pytest.raises((ValueError, ParallelSizeError), match=names):
        qwen3(**options)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("{model", r"config.json is not JSON: Expecting"),
        ("[1]", r"config.json holds a list, not settings by name"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0 in .*config.json must be a positive integer"),
        ({"num_attention_heads": 0}, r"num_attention_heads=0 in .*config.json must be a positive integer"),
        ({"hidden_size": "abc"}, r"hidden_size='abc' in .*config.json must be a positive integer"),
        ({"vocab_size": -1}, r"vocab_size=-1 in .*config.json must be a positive integer"),
    ],
)
def test_bad_configs_are_named(tmp_path: Path, content: Any, names: str) -> None:
    text = content if isinstance(content, str) else json.dumps(PUBLISHED["Qwen3-8B"] | content)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit, match=f"error: .*{names}"):
        main(["estimate", "--model", str(tmp_path), "--sequence_length", "128"])


def test_small_models_are_told_in_mib() -> None:
    model = PUBLISHED["Qwen3-8B"] | {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    estimate = estimate_memory(model, ParallelSizes(1), sequence_length=16, accelerator="cpu")
    table = estimate.__rich__()
    assert f"{estimate.total / 2**20:.2f} MiB" in str(table.title)
    assert [column.header for column in table.columns] == ["component", "MiB", "share"]
    assert "CUDA" not in str(table.caption)


def test_flops_of_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length=0 must be a positive integer"):
        flops_per_token(PUBLISHED["Qwen3-8B"], 0)


def test_what_is_kept_is_what_the_settings_say() -> None:
    plain = qwen3()
    parts = plain.components
    assert sum(parts.values()) == plain.total == plain.to_dict()["total"]
    assert qwen3(micro_batch_size=2).components["mlp"] == 2 * parts["mlp"]
    assert qwen3(optimizer="sgd").total == plain.total - parts["optimizer state"]
    assert "attention scores" not in parts
    scores = 36 * (16 * 4096**2 * 2 + 4096**2)  # and the mask
    assert qwen3(attention="unfused").components["attention scores"] == scores
    assert qwen3(bias_activation_fusion=True).components["mlp"] == parts["mlp"] / 2
    assert qwen3(precision="32-true").components["attention scores"] == 36 * (16 * 4096**2 * 4 + 4096**2)
    assert qwen3(hidden_dropout=0.1).total == plain.total + 36 * 2 * 4096 // 2 * 4096, "a byte for each"
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = qwen3(**full)
    assert "mlp" not in recomputed.components
    # All layers' inputs; and what is computed again is one layer of all that is kept without.
    assert recomputed.components["recomputed layers' inputs"] == pytest.approx(36 * 4096 * 4096 // 2 * 2, rel=0.02)
    assert recomputed.total < plain.total
    assert "bf16-true" in str(plain.__rich__().caption)


@pytest.mark.parametrize("lora", [{}, {"dropout": 0.1}, {"freeze_a": True}], ids=str)
@pytest.mark.parametrize("layers", ["te", "local"])
def test_what_is_gathered_is_what_local_does_not_keep(layers: str, lora: dict[str, Any]) -> None:
    gather, regather, local = (
        qwen3(layers=layers, lora=LoRAConfig(sequence_mode=mode, **lora)).sites
        for mode in ("gather", "regather", "local")
    )
    for site, less, least in zip(gather, regather, local, strict=True):
        assert site.cost.gathered_per_token == site.cost.kept_per_token - least.cost.kept_per_token
        assert less.cost.gathered_per_token == least.cost.gathered_per_token == 0
    wide = {"linear_qkv", "linear_fc1"} if "freeze_a" not in lora else set()
    assert {site.site.rpartition(".")[2] for site in gather if site.cost.gathered_per_token} == wide


def test_what_is_not_counted_is_said() -> None:
    said = "float32 that activations become where biases are added"
    assert said not in qwen3(precision="bf16-mixed").to_dict()["not_counted"]
    assert said not in qwen3(add_qkv_bias=True).to_dict()["not_counted"]
    assert said not in qwen3(precision="bf16-mixed", add_qkv_bias=True).to_dict()["not_counted"]
    with_biases = qwen3(precision="bf16-mixed", add_qkv_bias=True, layers="local")
    assert said in with_biases.to_dict()["not_counted"]
    assert said in str(with_biases.__rich__().caption)


def test_experts_get_what_their_capacity_lets_them() -> None:
    def experts(**options: Any) -> int:
        sizes = ParallelSizes(4, 4, True, 4, 1)
        estimate = estimate_memory(PUBLISHED["Qwen3-30B-A3B"], sizes, sequence_length=4096, **options)
        return estimate.components["experts"]

    routed = experts(expert_imbalance=2.0) - experts()
    assert routed > 0
    capped = experts(expert_imbalance=2.0, moe_expert_capacity_factor=1.5, moe_router_load_balancing_type="none")
    assert capped - experts() == pytest.approx(routed / 2, abs=2)


def test_cast_weights_are_kept() -> None:
    """Transformer Engine's linears, under mixed precision; of layers that are computed again for one at a time."""
    name = "weights cast to half precision"
    linears = 36 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 12288)
    one = {"sizes": ParallelSizes(1), "precision": "bf16-mixed"}
    assert qwen3(**one).components[name] == 2 * linears
    assert qwen3(precision="bf16-mixed").components[name] == linears
    assert name not in qwen3().components
    assert name not in qwen3(**one, layers="local").components
    mlp = qwen3(**one, recompute_granularity="selective", recompute_modules=["mlp"])
    assert mlp.components[name] == 2 * 36 * (4096 * (4096 + 2048) + 4096 * 4096)
    experts = estimate_memory(
        PUBLISHED["Qwen3-30B-A3B"], ParallelSizes(4, 1, False, 4, 1), sequence_length=4096, precision="bf16-mixed"
    )
    of_layer = 2048 * (4096 + 1024) + 4096 * 2048 + 128 // 4 * 3 * 2048 * 768
    assert experts.components[name] == 2 * 48 * of_layer


def test_what_is_not_modelled_is_said() -> None:
    assert qwen3().not_counted.startswith("CUDA's context")
    found = qwen3(mtp_num_layers=1, cpu_offloading=True, cpu_offloading_num_layers=1)
    assert found.not_counted.startswith("what cpu_offloading=True, mtp_num_layers=1 changes, CUDA's context")
    assert "not counted: what cpu_offloading=True" in str(found.__rich__().caption)


def test_layers_before_the_first_that_trains_run_forward_only() -> None:
    """2 N for each parameter there and a third of their attention, and 4 N and all of it after."""
    model, length = PUBLISHED["Qwen3-8B"], 4096
    layer = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 12288
    attention = 12 * 4096 * length / 2
    found, all_layers = (
        flops_per_token(model, length, LoRAConfig(rank=16, layers_to_transform=layers)) for layers in ((35,), None)
    )
    factors = 16 * (4096 + 6144 + 2 * 4096 + 4096 + 2 * 12288 + 12288 + 4096)
    assert found == pytest.approx(
        35 * (2 * layer + attention / 3) + 4 * (layer + 4096 * 151936) + attention + 6 * factors, rel=1e-12
    )
    assert found < 0.55 * all_layers


def test_frozen_linears_count_two_thirds() -> None:
    """6 N for each parameter that trains, 4 N for each that does not, and attention's own product."""
    sequence = 4096
    found = flops_per_token(PUBLISHED["Qwen3-8B"], sequence, LoRAConfig(rank=16))
    hidden, ffn, heads, keys, layers, vocabulary = 4096, 12288, 4096, 2048, 36, 151936
    linears = layers * (hidden * (heads + keys) + heads * hidden + 3 * hidden * ffn) + hidden * vocabulary
    wide = ((hidden, heads + keys), (heads, hidden), (hidden, 2 * ffn), (ffn, hidden))
    factors = layers * sum(16 * (d_in + d_out) for d_in, d_out in wide)
    attention = layers * 3 * 2 * 2 * heads * sequence / 2
    assert found == pytest.approx(4 * linears + 6 * factors + attention, rel=1e-12)
