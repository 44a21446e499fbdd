"""A killed run continues to the bit; checkpoints hold whole tensors; what does not fit is refused."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch, runs, tiny
from tests.workers import WorkerError, WorkerPool


def final(folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"final-{rank}.pt")


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_killed_run_continues_bitwise(tiny_llama: Path, tmp_path: Path, tp: int) -> None:
    # Eight steps of two batches pass the end of the first epoch at TP=1 and DP=2; the kill comes in mid-epoch.
    common = ["--model", tiny_llama, "--tp", tp]
    # Started by two torchruns, by the script itself, and by SLURM: that must make no difference either.
    (tmp_path / "straight").mkdir()
    straight = launch.two_torchruns(*common, "--out", tmp_path / "straight")
    killed = launch.script(*common, "--out", tmp_path / "killed", "--kill-at", 7)
    launch.finish(*straight)
    launch.finish(*killed, code=-signal.SIGKILL)
    checkpoints = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert checkpoints == ["step=3.ckpt", "step=6.ckpt"]
    launch.finish(*launch.slurm(*common, "--out", tmp_path / "killed", "--resume", tmp_path / "killed" / "step=6.ckpt"))
    for rank in range(2):
        one, other = final(tmp_path / "straight", rank), final(tmp_path / "killed", rank)
        assert one["step"] == 8
        assert_equal(one, other)


# -- format ----------------------------------------------------------------------------------------------------


def _save(directory: str, out: str, tp: int, mode: str, weights_only: bool = False) -> None:
    from lightning_mcore_lora import MCoreTP

    module = runs.TinyModule(directory)
    trainer = runs.trainer(MCoreTP(tensor_parallel_size=tp), mode, max_steps=1)
    trainer.fit(module)
    runs.set_random_factors(module.model)
    trainer.strategy.setup_environment()
    trainer.save_checkpoint(out, weights_only=weights_only)


def _load_plain(out: str) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    from lightning_mcore_lora import cpu_backend

    cpu_backend.apply()
    return dist_checkpointing.load_plain_tensors(out)


@pytest.mark.parametrize(("tp", "mode"), [(1, "local"), (2, "local"), (3, "regather")])
def test_checkpoint_holds_whole_factors(
    workers: WorkerPool, tiny_llama: Path, tmp_path: Path, tp: int, mode: str
) -> None:
    out = tmp_path / "adapter.ckpt"
    workers(tp, _save, str(tiny_llama), str(out), tp, mode)
    tensors = workers(1, _load_plain, str(out))[0]
    keys = {key for key in tensors if key.startswith("model.")}
    for layer in range(tiny.LAYERS):
        for site in tiny.SITES:
            owner = "mlp" if "fc" in site else "self_attention"
            prefix = f"model.model.decoder.layers.{layer}.{owner}.{site}.lora"
            expected = tiny.factors(layer, site)
            assert torch.equal(tensors[f"{prefix}.a"], expected.a)
            keys.remove(f"{prefix}.a")
            if site == "linear_fc1":  # gate and up are stored apart, so that no layout interleaves them
                for i, part in enumerate(("gate_proj", "up_proj")):
                    assert torch.equal(tensors[f"{prefix}.b.{i}"], expected.b[part])
                    keys.remove(f"{prefix}.b.{i}")
            else:
                assert torch.equal(tensors[f"{prefix}.b"], tiny.fuse_rows(site, expected.b))
                keys.remove(f"{prefix}.b")
    assert not keys, "only adapters are saved"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    assert manifest["layout"]["tensor"] == tp
    assert manifest["lora"]["alpha"] == tiny.ALPHA
    assert manifest["base"]["name"] == tiny_llama.name
    assert {path.name for path in out.iterdir()} == {"manifest.json", *manifest["files"]}


def _resume(directory: str, out: str, tp: int, targets: tuple[str, ...], alpha: float = tiny.ALPHA) -> None:
    import lightning.pytorch as pl

    from lightning_mcore_lora import LoRASPCallback, MCoreTP

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=MCoreTP(tensor_parallel_size=tp),
        callbacks=[LoRASPCallback(rank=tiny.RANK, alpha=alpha, target_modules=targets, verbose=False)],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(runs.TinyModule(directory), ckpt_path=out)


def test_what_does_not_fit_is_refused(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter.ckpt"
    workers(2, _save, str(tiny_llama), str(out), 2, "local")
    with pytest.raises(WorkerError, match=r"alpha=32.0 in LoRAConfig, saved with 18.0"):
        workers(2, _resume, str(tiny_llama), str(out), 2, tiny.SITES, alpha=32.0)
    with pytest.raises(WorkerError, match=r"unexpected there: \['model.decoder.layers.0.mlp.linear_fc1.lora.a'"):
        workers(2, _resume, str(tiny_llama), str(out), 2, ("linear_qkv",))
    workers(2, _save, str(tiny_llama), str(tmp_path / "weights.ckpt"), 2, "local", weights_only=True)
    with pytest.raises(WorkerError, match="checkpoint contains only the model"):
        workers(2, _resume, str(tiny_llama), str(tmp_path / "weights.ckpt"), 2, tiny.SITES)
    (out / "manifest.json").unlink()
    with pytest.raises(WorkerError, match=r"not a complete checkpoint of this package: it has no manifest.json"):
        workers(2, _resume, str(tiny_llama), str(out), 2, tiny.SITES)


def test_unwritable_place_fails_on_every_rank(workers: WorkerPool, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerError, match=r"(?s)rank 0: CheckpointError: cannot write.*rank 1: CheckpointError"):
        workers(2, _save, str(tiny_llama), str(tmp_path / "file" / "adapter.ckpt"), 2, "local")
