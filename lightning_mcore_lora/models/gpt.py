"""Build Megatron-Core GPT models for the current parallel layout."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from lightning_mcore_lora.models.described import Source, describe, transformer_config, with_overrides
from lightning_mcore_lora.models.marks import mark_parameters
from lightning_mcore_lora.models.norms import SequenceParallelNorm
from lightning_mcore_lora.models.routers import keep_from_autocast
from lightning_mcore_lora.models.vocabulary import hide_padding, padded_size
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes


def build_gpt_model(
    source: Source,
    parallel: ParallelContext,
    *,
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
    share_embeddings_and_output_weights: bool = False,
    rotary_base: float = 10000.0,
    **overrides: Any,
) -> GPTModel:
    """Build a GPT model with random weights, split as ``parallel`` says.

    Uses Transformer Engine's layers where CUDA and Transformer Engine are present, Megatron-Core's own elsewhere.
    Logits stay sharded over the vocabulary; with ``labels`` the model returns the loss of every token. A vocabulary
    that the tensor-parallel size does not divide is padded; no loss sees the padding's logits, the lowest number.

    Args:
        source: A Hugging Face model directory (its ``config.json`` is read), the content of a ``config.json``, or a
            Megatron-Core config, whose parallel sizes are replaced by those of ``parallel``.
        parallel: The layout, usually ``trainer.strategy.parallel``.
        vocab_size: Rows of the embedding. Read from the directory; required with a ``TransformerConfig``.
        max_sequence_length: Longest sequence. Read from the directory; required with a ``TransformerConfig``.
        share_embeddings_and_output_weights: Whether the output layer is the embedding. Read from the directory.
        rotary_base: Base of the rotary embedding. Read from the directory.
        **overrides: Fields of ``TransformerConfig`` to set, for example ``params_dtype=torch.bfloat16``.

    Returns:
        The model, on the CPU, in training mode, every parameter trainable. Inputs ``[batch, sequence]``.

    Raises:
        ParallelSizeError: If the model cannot be split so.
        NotImplementedError: If Megatron-Core cannot express the model, naming the setting.
    """
    described = describe(
        source,
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        tied=share_embeddings_and_output_weights,
        rotary_base=rotary_base,
    )
    rope = described.rope
    use_te = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    config = transformer_config(with_overrides(described.fields, overrides), parallel.sizes, use_te)
    for name, value in rope.settings.items():
        setattr(config, name, value)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te, normalization=config.normalization)
    if not use_te:
        spec = _with_sequence_parallel_norms(spec)
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_size(described.vocab_size, parallel.sizes.tensor),
        max_sequence_length=described.max_sequence_length,
        parallel_output=True,
        share_embeddings_and_output_weights=described.tied,
        position_embedding_type=rope.embedding,
        rotary_base=rope.base,
    )
    if rope.rescale is not None:
        model.rotary_pos_emb.inv_freq = rope.rescale(model.rotary_pos_emb, model.rotary_pos_emb.inv_freq)
    hide_padding(model, described.vocab_size, parallel)
    if described.settings is not None:
        model.hf_config = described.settings
        model.base_path = str(Path(source).resolve()) if isinstance(source, str | Path) else None
    mark_parameters(model)
    keep_from_autocast(model)
    model.register_forward_pre_hook(_SequenceCheck(parallel.sizes), with_kwargs=True)
    return model


def _with_sequence_parallel_norms(spec: Any) -> Any:
    """The same spec with every torch norm replaced."""
    if spec is WrappedTorchNorm:
        return SequenceParallelNorm
    if isinstance(spec, list):
        return [_with_sequence_parallel_norms(item) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        changed = {f.name: _with_sequence_parallel_norms(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **changed)
    return spec


@dataclasses.dataclass(frozen=True)
class _SequenceCheck:
    """Forward hook: a batch that sequence parallelism cannot split fails with the reason, not inside a collective."""

    sizes: ParallelSizes

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        input_ids = args[0] if args else kwargs.get("input_ids")
        if input_ids is not None:
            self.sizes.check_sequence(input_ids.shape[1])
