"""Fine-tune a Hugging Face model with LoRA under tensor, sequence and expert parallelism.

Without arguments: SmolLM2-135M-Instruct on Python's own help topics, three processes, on the CPU::

    python examples/finetune.py
    python examples/finetune.py --data mine.jsonl --regather --rank 12
    python examples/finetune.py --resume last
"""

import argparse
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from chat_data import ChatDataModule, DataError
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sft import SFTModule
from smollm2 import smollm2_directory

from lightning_mcore_lora import LoRASPCallback, MCoreTP, MemoryMonitor, RouterMonitor, generate, save_peft_adapter

for message in (".*is deprecated.*", ".*does not have many workers.*", ".*sync_dist=True.*", ".*is not empty.*"):
    warnings.filterwarnings("ignore", message=message)


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="Hugging Face directory (default: SmolLM2-135M)")
    parser.add_argument("--data", help=".jsonl with prompt/completion or messages (default: Python's help topics)")
    parser.add_argument("--out", default="runs/finetune", help="where logs and adapter checkpoints go")
    parser.add_argument("--resume", help="checkpoint to continue from, or 'last' for the newest in --out")
    parser.add_argument("--tensor-parallel-size", type=int, default=3)
    parser.add_argument("--expert-parallel-size", type=int, default=1, help="of a mixture of experts")
    parser.add_argument("--expert-tensor-parallel-size", type=int, help="of a mixture of experts (default: as tensor)")
    parser.add_argument("--devices", type=int, help="processes (default: the tensor-parallel size)")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--alpha", type=float, default=24.0)
    parser.add_argument("--regather", action="store_true", help="input re-gather (default: auto, which is local)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per optimizer step")
    parser.add_argument("--max-length", type=int, default=192)
    parser.add_argument("--max-samples", type=int, default=160)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="optimizer steps between checkpoints")
    parser.add_argument("--question", default="What is a context manager in Python?")
    return parser.parse_args()


class SampleAnswer(pl.Callback):
    """Asks one question before and after training."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.answers: list[str] = []

    def _ask(self, trainer: pl.Trainer, module: SFTModule) -> None:
        tokenizer = trainer.datamodule.tokenizer
        message = [{"role": "user", "content": self.question}]
        prompt = tokenizer(
            tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True), add_special_tokens=False
        )["input_ids"]
        answer = generate(
            module.gpt,
            prompt,
            trainer.strategy.parallel,
            max_new_tokens=24,
            stop_tokens=[tokenizer.eos_token_id],
        )
        self.answers.append(tokenizer.decode(answer).strip())

    def on_fit_start(self, trainer: pl.Trainer, pl_module: SFTModule) -> None:
        """Before."""
        self._ask(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: SFTModule) -> None:
        """After."""
        self._ask(trainer, pl_module)


def main() -> None:
    """Validate, train, validate, and tell what came out."""
    args = arguments()
    torch.set_float32_matmul_precision("high")
    pl.seed_everything(0, workers=True, verbose=False)
    directory = str(smollm2_directory() if args.model == "smollm2" else Path(args.model))
    module = SFTModule(directory, lr=args.lr)
    data = ChatDataModule(
        directory, args.data, batch_size=args.batch_size, max_length=args.max_length, max_samples=args.max_samples
    )
    sample = SampleAnswer(args.question)
    checkpoints = ModelCheckpoint(
        dirpath=args.out, filename="adapter-{step}", save_last=True, every_n_train_steps=args.checkpoint_every
    )
    trainer = pl.Trainer(
        accelerator="auto",
        devices=args.devices or args.tensor_parallel_size,
        strategy=MCoreTP(
            tensor_parallel_size=args.tensor_parallel_size,
            expert_parallel_size=args.expert_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        ),
        precision=args.precision,
        max_epochs=args.epochs,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # the data module's batches know the data-parallel ranks
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        logger=CSVLogger(args.out, name="log"),
        callbacks=[
            LoRASPCallback(rank=args.rank, alpha=args.alpha, regather=True if args.regather else None),
            MemoryMonitor(),
            RouterMonitor(),
            sample,
            checkpoints,
        ],
        enable_model_summary=False,
    )
    try:
        before = trainer.validate(module, data, verbose=False)[0]
        trainer.fit(module, data, ckpt_path=args.resume)
        after = trainer.callback_metrics  # of the validation that ended the last epoch
        if args.max_steps > 0:  # it may have ended before
            after = trainer.validate(module, data, verbose=False)[0]
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
    adapter = Path(args.out) / "adapter"
    save_peft_adapter(module, adapter)
    if trainer.is_global_zero:
        print(f"\nHeld-out loss        {before['val_loss']:.4f} -> {after['val_loss']:.4f}")
        print(f"Held-out perplexity  {before['val_perplexity']:.2f} -> {after['val_perplexity']:.2f}")
        print(f"Question  {args.question}")
        for when, answer in zip(("before", "after "), sample.answers, strict=True):
            print(f"  {when}  {answer}")
        print(f"Checkpoint           {os.path.relpath(checkpoints.last_model_path or args.out)}")
        print(f"PEFT adapter         {os.path.relpath(adapter)}")


if __name__ == "__main__":
    main()
