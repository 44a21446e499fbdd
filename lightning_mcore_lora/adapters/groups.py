"""Parameter groups for the user's optimizer."""

from typing import Any

from torch import nn

from lightning_mcore_lora.adapters.apply import adapters


def lora_plus_groups(model: nn.Module, lr: float, ratio: float = 16.0) -> list[dict[str, Any]]:
    """Groups with a higher learning rate for B (LoRA+, https://arxiv.org/abs/2402.12354).

    Args:
        model: A model after its adapters are there, such as ``self`` in ``configure_optimizers``.
        lr: Learning rate of A, of magnitudes and of whatever else trains.
        ratio: Learning rate of B over that of A.

    Returns:
        Two groups for a torch optimizer: ``torch.optim.AdamW(lora_plus_groups(self, lr=1e-4))``.

    Raises:
        ValueError: If the model has no adapters, or ``ratio`` is not positive.
    """
    if not ratio > 0:
        raise ValueError(f"ratio={ratio!r} must be positive")
    high = {id(adapter.b): adapter.b for _, adapter in adapters(model)}
    if not high:
        raise ValueError(f"{type(model).__name__} has no LoRA adapters: make the optimizer after they are applied")
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in high]
    return [{"params": rest, "lr": lr}, {"params": list(high.values()), "lr": lr * ratio}]
