"""Spawned processes: what may follow a fit, and what may not. Prints one JSON object."""

import argparse
import json
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore_lora import LoRASPCallback, MCoreTP, build_gpt_model
from tests.scripts.tiny_fit import Module, tiny


class Validating(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    val_dataloader = Module.train_dataloader


def trainer(out: str, max_steps: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MCoreTP(tensor_parallel_size=2, start_method="spawn"),
        max_steps=max_steps,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        val_check_interval=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LoRASPCallback(rank=4, verbose=False), ModelCheckpoint(out, save_last=True)],
    )


def refused(action: Any) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def in_fabric(fabric: Fabric, model: str) -> float:
    parallel = fabric.strategy.parallel
    built = fabric.setup(build_gpt_model(model, parallel).requires_grad_(False).eval())
    ids = tiny.tokens()[:2, :-1]
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    return fabric.all_reduce(built(ids, positions, None, labels=ids).mean()).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    module, spawning = Validating(args.model), trainer(args.out, 2)
    spawning.fit(module)
    result: dict[str, Any] = {
        "after fit": spawning.callback_metrics["val_loss"].item(),
        "validate": refused(lambda: spawning.validate(module, verbose=False)),
        "fit": refused(lambda: spawning.fit(module)),
        "last": spawning.validate(module, ckpt_path="last", verbose=False)[0]["val_loss"],
    }
    spawning.fit_loop.epoch_loop.max_steps = 4
    spawning.fit(module, ckpt_path="last")
    result["longer"] = spawning.callback_metrics["val_loss"].item()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=MCoreTP(2, start_method="spawn"))
    result["fabric"] = fabric.launch(in_fabric, args.model)
    print(json.dumps(result))
