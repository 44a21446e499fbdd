"""What a Hugging Face ``config.json`` says, in Megatron-Core's words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mcore_lora.models.families import FAMILIES, Family
from lightning_mcore_lora.models.rope import Rope, read_rope

_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class HFConfig:
    """The settings of one model.

    Args:
        family: Its row of the families.
        transformer: Fields of ``TransformerConfig``.
        vocab_size: Tokens.
        max_sequence_length: Longest sequence.
        tied: Whether the output layer is the embedding.
        rope: The rotary embedding.
        settings: The file's content.
    """

    family: Family
    transformer: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    tied: bool
    rope: Rope
    settings: dict[str, Any]


def read_hf_config(source: str | Path | Mapping[str, Any]) -> HFConfig:
    """Read the ``config.json`` of a Hugging Face model directory.

    Args:
        source: The folder that holds it, or its content.

    Returns:
        The settings in Megatron-Core's words.

    Raises:
        FileNotFoundError: If there is no ``config.json``.
        NotImplementedError: If the family or one of its settings is not supported, naming it.
        ValueError: If a setting is missing, or has no such value, or the file holds no settings.
    """
    where, settings = ("the config", dict(source)) if isinstance(source, Mapping) else _read(Path(source))
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise NotImplementedError(f"model_type={kind!r} in {where} is not supported; supported: {sorted(FAMILIES)}")
    family = FAMILIES[kind]
    quantised = (settings.get("quantization_config") or {}).get("quant_method")
    if quantised is not None:
        raise NotImplementedError(
            f"quant_method={quantised!r} in {where} is not supported: write plain weights first, with "
            "`lightning-mcore-lora dequantize --model DIR --out DIR`"
        )
    known = family.defaults | settings
    for setting, allowed in family.supported.items():
        value = known.get(setting)
        if value not in allowed:
            raise NotImplementedError(
                f"{setting}={value!r} in {where} is not supported for model_type={kind!r}; supported: {allowed[0]!r}"
            )
    for setting in _COUNTS:
        value = known.get(setting)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{setting}={value!r} in {where} must be a positive integer")
    try:
        return HFConfig(
            family=family,
            transformer=family.fields(known),
            vocab_size=known["vocab_size"],
            max_sequence_length=known["max_position_embeddings"],
            tied=known.get("tie_word_embeddings", False),
            rope=read_rope(known),
            settings=settings,
        )
    except KeyError as missing:
        raise ValueError(f"{where} lacks the setting {missing}, which model_type={kind!r} needs") from missing


def _read(directory: Path) -> tuple[str, dict[str, Any]]:
    path = directory / "config.json"
    if path.is_file():
        try:
            settings = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{path} holds a {type(settings).__name__}, not settings by name")
        return str(path), settings
    if directory.suffix == ".gguf":
        raise NotImplementedError(
            f"{directory} holds quantised weights: write plain ones first, with `lightning-mcore-lora dequantize "
            f"--model {directory} --out DIR`"
        )
    raise FileNotFoundError(f"{path} not found: a Hugging Face model directory has a config.json")
