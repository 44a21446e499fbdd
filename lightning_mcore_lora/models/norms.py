"""Norms for Megatron-Core's local layer spec that work under sequence parallelism."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class SequenceParallelNorm:
    """Builds ``torch.nn.RMSNorm`` or ``LayerNorm`` as Megatron-Core's specs construct norms.

    Megatron-Core's own ``WrappedTorchNorm`` refuses sequence parallelism. All that is needed is the mark
    ``sequence_parallel`` on the weights: under it each rank sees only its part of the sequence, so
    ``finalize_model_grads`` sums their gradients over the tensor-parallel group.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore[misc]
        """Build the norm that ``config.normalization`` names.

        Raises:
            ValueError: If the config asks for what the torch norms cannot do.
        """
        kinds: dict[str, type[torch.nn.Module]] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(f"normalization={config.normalization!r} is not one of {sorted(kinds)}")
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma=True needs Transformer Engine; set it to False")
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
