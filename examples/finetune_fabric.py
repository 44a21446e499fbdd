"""The fine-tune of ``finetune.py`` in a loop of your own, with Fabric: the same options, the same numbers.

Without arguments: SmolLM2-135M-Instruct on Python's own help topics, three processes, on the CPU::

    python examples/finetune_fabric.py
    python examples/finetune_fabric.py --data mine.jsonl --regather --rank 12
    python examples/finetune_fabric.py --resume runs/finetune/last.ckpt
"""

import os
from pathlib import Path
from typing import Any

import torch
from chat_data import ChatDataModule, DataError
from finetune import arguments
from lightning.fabric import Fabric, seed_everything
from sft import linear_schedule, token_losses
from smollm2 import smollm2_directory
from torchmetrics import MeanMetric
from tqdm import tqdm

from lightning_mcore_lora import FabricMemoryMonitor, LoRAConfig, MCoreTP, apply_lora, build_gpt_model, load_hf_weights


@torch.no_grad()
def held_out_loss(fabric: Fabric, model: torch.nn.Module, loader: Any) -> float:
    """Mean loss of the held-out answers' tokens."""
    mean = MeanMetric(process_group=fabric.strategy.data_parallel_group).to(fabric.device)
    model.eval()
    for batch in loader:
        tokens = batch["mask"].sum(dtype=torch.float32)
        mean.update((token_losses(model, batch) * batch["mask"]).sum() / tokens, tokens)
    model.train()
    return mean.compute().item()


def main() -> None:
    """Evaluate, train, evaluate, and tell what came out."""
    args = arguments()
    torch.set_float32_matmul_precision("high")
    seed_everything(0, workers=True, verbose=False)
    directory = str(smollm2_directory() if args.model == "smollm2" else Path(args.model))
    strategy = MCoreTP(tensor_parallel_size=args.tensor_parallel_size)
    devices = args.devices or args.tensor_parallel_size
    fabric = Fabric(accelerator="auto", devices=devices, strategy=strategy, precision=args.precision)
    fabric.launch()

    data = ChatDataModule(
        directory, args.data, batch_size=args.batch_size, max_length=args.max_length, max_samples=args.max_samples
    )
    try:
        data.setup("fit")
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
    loader, held_out = fabric.setup_dataloaders(
        data.loader(data.training, data.seed, strategy.parallel),
        data.loader(data.validation, None, strategy.parallel),
        use_distributed_sampler=False,  # the batches know the data-parallel ranks
    )

    with fabric.init_module():
        gpt = build_gpt_model(directory, strategy.parallel, perform_initialization=False)
        load_hf_weights(gpt, directory, strategy.parallel)
    mode = "regather" if args.regather else "auto"
    report = apply_lora(gpt, LoRAConfig(rank=args.rank, alpha=args.alpha, sequence_mode=mode))
    if fabric.is_global_zero:
        report.print()
    model, optimizer = fabric.setup(gpt, torch.optim.AdamW(gpt.parameters(), lr=args.lr, weight_decay=0.0))

    each = -(-len(loader) // args.accumulate)  # optimizer steps an epoch
    steps = args.epochs * each if args.max_steps < 0 else min(args.max_steps, args.epochs * each)
    schedule = linear_schedule(optimizer, steps, warmup_steps=3)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader, "step": 0}
    checkpoint = Path(args.out) / "last.ckpt"
    before = held_out_loss(fabric, model, held_out)
    if args.resume:
        fabric.load(args.resume, state)

    bar = tqdm(total=steps, initial=state["step"], disable=not fabric.is_global_zero)
    with FabricMemoryMonitor(fabric, model, every=5, optimizer=optimizer) as memory:  # explains an out-of-memory
        while state["step"] < steps:
            for i, batch in enumerate(loader, start=state["step"] % each * args.accumulate):
                last = (i + 1) % args.accumulate == 0 or i + 1 == len(loader)
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = (token_losses(model, batch) * batch["mask"]).sum()
                    tokens = batch["mask"].sum(dtype=torch.float32)
                    fabric.backward(loss, num_tokens=tokens)  # each token of an optimizer step weighs the same
                if not last:
                    continue
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                state["step"] += 1
                memory.step(state["step"])
                bar.update()
                bar.set_postfix(train_loss=f"{loss.item() / tokens.item():.3f}")
                if state["step"] % args.checkpoint_every == 0 or state["step"] == steps:
                    fabric.save(checkpoint, state)
                if state["step"] == steps:
                    break
    bar.close()
    after = held_out_loss(fabric, model, held_out)
    if fabric.is_global_zero:
        print(f"\nHeld-out loss        {before:.4f} -> {after:.4f}")
        print(f"Adapter checkpoint   {os.path.relpath(checkpoint)}")


if __name__ == "__main__":
    main()
