"""Train the tiny Llama as a user would: a script that the launcher runs once per process."""

import argparse
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_mcore_lora import LoRASPCallback, MCoreTP, build_gpt_model, load_hf_weights
from tests import tiny


class Module(pl.LightningModule):
    def __init__(self, directory: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.directory = directory
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            parallel = self.trainer.strategy.parallel
            # Dropout everywhere: only exact random streams continue exactly.
            self.model = build_gpt_model(self.directory, parallel, hidden_dropout=0.1, attention_dropout=0.1)
            load_hf_weights(self.model, self.directory, parallel)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (samples,) = batch
        ids = samples[:, :-1].contiguous()
        positions = torch.arange(ids.shape[1])[None].expand_as(ids)
        return self.model(ids, positions, None, labels=samples[:, 1:].contiguous()).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(tiny.tokens()), batch_size=1, shuffle=True)


class Kill(pl.Callback):
    """Ends this process in the middle of a step, as the kernel would; on one rank, or on all."""

    def __init__(self, step: int, rank: int | None) -> None:
        self.step, self.rank = step, rank

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--kill-rank", type=int)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--resume")
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    module = Module(args.model)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=MCoreTP(tensor_parallel_size=args.tp),
        max_steps=args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            LoRASPCallback(rank=4, verbose=False),
            ModelCheckpoint(dirpath=args.out, every_n_train_steps=3, save_top_k=-1, filename="{step}"),
            Kill(args.kill_at, args.kill_rank),
        ],
    )
    trainer.fit(module, ckpt_path=args.resume)
    optimizer = trainer.optimizers[0].state_dict()
    torch.save(
        {
            "weights": trainer.strategy.lightning_module_state_dict(),
            "moments": [optimizer["state"][i] for i in sorted(optimizer["state"])],
            "rate": optimizer["param_groups"][0]["lr"],
            "step": trainer.global_step,
        },
        f"{args.out}/final-{trainer.global_rank}.pt",
    )


if __name__ == "__main__":
    main()
