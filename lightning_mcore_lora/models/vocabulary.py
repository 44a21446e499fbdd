"""Vocabularies that the tensor-parallel size does not divide."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mcore_lora.parallel import ParallelContext


def padded_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding over all ranks: the next multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def hide_padding(model: Any, vocab_size: int, parallel: ParallelContext) -> None:
    """Keep padded rows out of every softmax, and the model's ``vocab_size`` what it is without them.

    Parameters get the mark ``is_vocabulary``: a checkpoint of them fits any padding.

    Args:
        model: A model with ``padded_size(vocab_size, TP)`` rows.
        vocab_size: Tokens.
        parallel: The layout.
    """
    model.vocab_size = vocab_size
    for module in (getattr(getattr(model, "embedding", None), "word_embeddings", None), model.output_layer):
        for parameter in module.parameters() if module is not None else ():
            parameter.is_vocabulary = True
    here = padded_size(vocab_size, parallel.sizes.tensor) // parallel.sizes.tensor
    real = min(max(vocab_size - parallel.tp_rank * here, 0), here)
    if real < here:
        model.output_layer.register_forward_hook(_Hidden(real))


@dataclass(frozen=True)
class _Hidden:
    """Forward hook of the output layer on a rank that holds padding."""

    real: int

    def __call__(self, module: nn.Module, args: tuple, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits = output[0]
        lowest = torch.finfo(logits.dtype).min
        return nn.functional.pad(logits[..., : self.real], (0, logits.shape[-1] - self.real), value=lowest), output[1]
