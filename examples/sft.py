"""Supervised fine-tuning as a LightningModule: your own code, the package's model and loss interface."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from lightning_mcore_lora import build_gpt_model, load_hf_weights


def token_losses(gpt: Any, batch: dict[str, Tensor]) -> Tensor:
    """Loss of every token, ``[batch, sequence]``."""
    inputs = batch["inputs"]
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None].expand_as(inputs)
    return gpt(inputs, positions, None, labels=batch["labels"])


def linear_schedule(optimizer: torch.optim.Optimizer, steps: int, warmup_steps: int) -> LambdaLR:
    """A learning rate that rises for ``warmup_steps``, then falls to zero at ``steps``."""

    def factor(step: int) -> float:
        return min((step + 1) / (warmup_steps + 1), max(0.0, 1 - step / steps))

    return LambdaLR(optimizer, factor)


class SFTModule(pl.LightningModule):
    """A Hugging Face causal language model, run by Megatron-Core.

    Args:
        model: Hugging Face directory.
        lr: Peak learning rate; it falls linearly to zero.
        warmup_steps: Steps in which it rises.
    """

    def __init__(self, model: str, lr: float = 1e-3, warmup_steps: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.directory = model
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.gpt: Any = None
        self.held_out_loss: MeanMetric | None = None

    def configure_model(self) -> None:
        """Build the model once the parallel groups exist."""
        if self.gpt is None:
            parallel = self.trainer.strategy.parallel
            self.gpt = build_gpt_model(self.directory, parallel, perform_initialization=False)
            load_hf_weights(self.gpt, self.directory, parallel)
            # Tensor-parallel peers hold the same loss; only data-parallel ranks have different ones.
            self.held_out_loss = MeanMetric(process_group=self.trainer.strategy.data_parallel_group)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Loss of every token, ``[batch, sequence]``."""
        return token_losses(self.gpt, batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Summed loss and number of answer tokens: each token of an optimizer step weighs the same."""
        loss, tokens = (self(batch) * batch["mask"]).sum(), batch["mask"].sum(dtype=torch.float32)
        self.log("train_loss", loss.detach() / tokens, prog_bar=True, batch_size=1)
        return {"loss": loss, "num_tokens": tokens}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect the held-out loss."""
        assert self.held_out_loss is not None
        loss, tokens = (self(batch) * batch["mask"]).sum(), batch["mask"].sum(dtype=torch.float32)
        self.held_out_loss.update(loss / tokens, tokens)

    def on_validation_epoch_end(self) -> None:
        """Log held-out loss and perplexity."""
        assert self.held_out_loss is not None
        loss = self.held_out_loss.compute()
        self.held_out_loss.reset()
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_perplexity", loss.exp(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW over what is trainable: the adapters."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        schedule = linear_schedule(optimizer, steps, self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
