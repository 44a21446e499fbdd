"""The strategy alone, without adapters: every weight of a dense or a mixture-of-experts model."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mcore_lora import MCoreTP
from tests import mcore_runs, runs, tiny
from tests.integration.test_parity import GRADIENT_BOUND, LOSS_BOUND, whole
from tests.oracle import relative_error
from tests.workers import WorkerError, WorkerPool


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tied-llama"), tied=True)


def fused(read: Any, model: Any, tied: bool) -> dict[str, Tensor]:
    """Weights, or gradients, of a transformers Llama under Megatron-Core's names."""
    result = {
        "embedding.word_embeddings.weight": read(model.model.embed_tokens.weight),
        "decoder.final_layernorm.weight": read(model.model.norm.weight),
    }
    if not tied:
        result["output_layer.weight"] = read(model.lm_head.weight)
    for i, layer in enumerate(model.model.layers):
        prefix = f"decoder.layers.{i}"
        result[f"{prefix}.input_layernorm.weight"] = read(layer.input_layernorm.weight)
        result[f"{prefix}.pre_mlp_layernorm.weight"] = read(layer.post_attention_layernorm.weight)
        for site, parts in tiny.OUTPUTS.items():
            owner, path = (layer.mlp, "mlp") if "fc" in site else (layer.self_attn, "self_attention")
            rows = {name: read(getattr(owner, name).weight) for name in parts}
            result[f"{prefix}.{path}.{site}.weight"] = tiny.fuse_rows(site, rows)
    return result


def oracle(directory: Path, tied: bool) -> dict[str, Any]:
    """Five steps in float64, all at once."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=tiny.ADAM_EPS)
    norms, gradients = [], []
    for samples in tiny.tokens().split(tiny.SAMPLES_PER_STEP):
        logits = model(samples[:, :-1]).logits
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).backward()
        gradients.append(fused(lambda p: p.grad.clone(), model, tied))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), runs.CLIP).item())
        optimizer.step()
    return {"norms": norms, "gradients": gradients, "weights": fused(lambda p: p.detach().clone(), model, tied)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("tp", "sp", "dp"),
    [
        (2, True, 2),
        pytest.param(3, True, 1, marks=pytest.mark.full),
        pytest.param(1, False, 2, marks=pytest.mark.full),
        pytest.param(2, False, 1, marks=pytest.mark.full),
    ],
)
def test_dense_equals_oracle(
    workers: WorkerPool, tiny_llama: Path, tied_llama: Path, tp: int, sp: bool, dp: int, tied: bool
) -> None:
    directory = tied_llama if tied else tiny_llama
    expected = oracle(directory, tied)
    ranks = workers(tp * dp, runs.train_full, str(directory), tp, sp)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=LOSS_BOUND)
        assert rank["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert relative_error(whole(ranks, [rank["weights"][name] for rank in ranks], name), weight) < LOSS_BOUND, name
        for step, gradient in enumerate(expected["gradients"]):
            values = [rank["gradients"][step][name] for rank in ranks]
            assert relative_error(whole(ranks, values, name), gradient[name]) < GRADIENT_BOUND, (name, step)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_half_precision_errs_no_more_than_one_process(workers: WorkerPool, tiny_llama: Path, precision: str) -> None:
    exact = oracle(tiny_llama, False)
    names = list(exact["weights"])

    def error(world: int, *layout: Any) -> float:
        ranks = workers(world, runs.train_full, str(tiny_llama), *layout, precision=precision)
        worst = 0.0
        for step, gradient in enumerate(exact["gradients"]):
            values = [whole(ranks, [r["gradients"][step][n] for r in ranks], n).double().flatten() for n in names]
            reference = torch.cat([gradient[name].flatten() for name in names])
            worst = max(worst, ((torch.cat(values) - reference).norm() / reference.norm()).item())
        return worst

    assert error(4, 2, True) < 2 * error(1, 1, False)


# -- mixture of experts ----------------------------------------------------------------------------------------

MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "qk_layernorm": True}


class MoEModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            parallel = self.trainer.strategy.parallel
            self.model = mcore_runs.moe_or_dense_model(parallel, **MOE)
            mcore_runs.fill_by_name(self.model, parallel)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        positions = torch.arange(ids.shape[1])[None].expand_as(ids)
        return self.model(ids, positions, None, labels=ids.roll(-1, 1)).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(runs.global_grad_norm(self.parameters()).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=tiny.ADAM_EPS)

    def train_dataloader(self) -> DataLoader:
        ids = torch.randint(0, mcore_runs.VOCAB, (16, mcore_runs.SEQUENCE), generator=torch.Generator().manual_seed(5))
        strategy = self.trainer.strategy
        return DataLoader(ids, batch_size=4 // strategy.parallel.sizes.data, shuffle=False)


def _train_moe(tp: int, ep: int, etp: int, out: str | None = None, ckpt: str | None = None) -> Any:
    """Four steps; what was there after two is saved to ``out``."""
    strategy = MCoreTP(tp, expert_parallel_size=ep, expert_tensor_parallel_size=etp)
    checkpoints = ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = runs.trainer(
        strategy,
        None,
        max_steps=4,
        accumulate_grad_batches=1,
        enable_checkpointing=out is not None,
        callbacks=(checkpoints,) if out else (),
    )
    module = MoEModule()
    trainer.fit(module, ckpt_path=ckpt)
    parallel, shards = strategy.parallel, {}
    for name, p in module.model.named_parameters():
        rank = parallel.etp_rank if ".experts." in name else parallel.tp_rank
        dim = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        shards[mcore_runs._global_name(name, module.model.config, parallel)] = (rank, dim, p.detach().clone())
    return {"gradients": shards, "norms": module.norms}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(4, (2, 2, 1), marks=pytest.mark.full),
        (4, (2, 2, 2)),
        pytest.param(2, (2, 1, 1), marks=pytest.mark.full),
        pytest.param(4, (1, 4, 1), marks=pytest.mark.full),
    ],
)
def test_experts_train_alike_at_every_layout(workers: WorkerPool, world: int, layout: tuple[int, int, int]) -> None:
    reference = workers(1, _train_moe, 1, 1, 1)[0]
    expected = mcore_runs.whole_gradients([reference])
    ranks = workers(world, _train_moe, *layout)
    found = mcore_runs.whole_gradients(ranks)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value.double()) < 5e-5, name
    for rank in ranks:
        assert rank["norms"] == pytest.approx(reference["norms"], rel=5e-5)


def test_experts_continue_bitwise(workers: WorkerPool, tmp_path: Path) -> None:
    straight = workers(4, _train_moe, 2, 2, 1, str(tmp_path))
    resumed = workers(4, _train_moe, 2, 2, 1, ckpt=str(tmp_path / "step=2.ckpt"))
    for one, other in zip(straight, resumed, strict=True):
        assert one["norms"][2:] == other["norms"]
        assert all(torch.equal(one["gradients"][name][2], other["gradients"][name][2]) for name in one["gradients"])


class Predicts(MoEModule):
    def predict_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(ids, batch_idx)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(5, mcore_runs.SEQUENCE, dtype=torch.long), batch_size=1)


def _predict_unevenly() -> None:
    runs.trainer(MCoreTP(1, expert_parallel_size=2), None).predict(Predicts())


def test_uneven_prediction_with_experts_is_refused_on_all_ranks(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0: DataLengthError: .*\[3, 2\].*rank 1: DataLengthError"):
        workers(2, _predict_unevenly)


def _saved_experts(out: str) -> set[str]:
    from megatron.core import dist_checkpointing

    from lightning_mcore_lora import cpu_backend

    cpu_backend.apply()
    return {key for key in dist_checkpointing.load_plain_tensors(out) if "local_experts" in key and "model." in key}


@pytest.mark.full
def test_every_expert_is_saved_once(workers: WorkerPool, tmp_path: Path) -> None:
    keys = []
    for world, layout in ((1, (1, 1, 1)), (4, (2, 2, 1))):
        workers(world, _train_moe, *layout, str(tmp_path / str(world)))
        keys.append(workers(1, _saved_experts, str(tmp_path / str(world) / "step=2.ckpt"))[0])
    assert keys[0] == keys[1]
    assert {key.split("local_experts.")[1].split(".")[0] for key in keys[0]} == {"0", "1", "2", "3"}
