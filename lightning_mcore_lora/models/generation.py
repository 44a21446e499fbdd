"""Greedy generation of short samples under tensor and sequence parallelism."""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from lightning_mcore_lora import cpu_backend
from lightning_mcore_lora.parallel import ParallelContext


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompt: Sequence[int],
    parallel: ParallelContext,
    *,
    max_new_tokens: int = 32,
    stop_tokens: Sequence[int] = (),
) -> list[int]:
    """Continue one prompt with the most likely token at each step.

    A collective: every rank of the tensor-parallel group must call it; of a mixture of experts with EP > 1 or ETP > TP
    every process, all with the same prompt.

    Each step runs the whole sequence again, with no key-value cache: meant for samples, not for serving. The sequence
    is padded on the right to a multiple of the tensor-parallel size, which causal attention does not see.

    Args:
        model: A Megatron-Core GPT model.
        prompt: Token numbers, the same on every rank.
        parallel: The layout.
        max_new_tokens: When to stop at the latest.
        stop_tokens: Tokens that end the answer; they are not returned.

    Returns:
        The new tokens, the same on every rank.
    """
    if not prompt:
        raise ValueError("prompt is empty: greedy generation needs at least one token to continue")
    device = next(model.parameters()).device
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    try:
        with cpu_backend.active():
            for _ in range(max_new_tokens):
                padding = -len(tokens) % parallel.sizes.tensor
                ids = torch.tensor([tokens + [0] * padding], device=device)
                positions = torch.arange(ids.shape[1], device=device)[None]
                logits = model(ids, positions, None)[:, len(tokens) - 1]
                whole = gather_from_tensor_model_parallel_region(logits, group=parallel.tp_group)
                token = int(whole.argmax(dim=-1))
                if token in stop_tokens:
                    break
                tokens.append(token)
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]
