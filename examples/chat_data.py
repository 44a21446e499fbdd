"""Chat data for supervised fine-tuning: loss on the answers only, batches of similar length."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_mcore_lora.parallel import ParallelContext

Message = dict[str, str]
EXPECTED = (
    'expected {"prompt": "...", "completion": "..."} or '
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


class DataError(ValueError):
    """A line of a data file is not what it should be."""


def read_jsonl(path: Path) -> list[list[Message]]:
    """Conversations of a file with one JSON object a line.

    Raises:
        DataError: With the line's number and what was expected.
    """
    conversations = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    conversations.append(_conversation(json.loads(line)))
                except (DataError, json.JSONDecodeError) as error:
                    raise DataError(f"{path}, line {number}: {error}; {EXPECTED}") from None
    if not conversations:
        raise DataError(f"{path} holds no line; {EXPECTED}")
    return conversations


def _conversation(entry: Any) -> list[Message]:
    if not isinstance(entry, dict):
        raise DataError(f"got {type(entry).__name__}")
    if "messages" not in entry:
        if not all(isinstance(entry.get(key), str) for key in ("prompt", "completion")):
            raise DataError(f"got the keys {sorted(entry)}")
        return [
            {"role": "user", "content": entry["prompt"]},
            {"role": "assistant", "content": entry["completion"]},
        ]
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise DataError("got messages that are not a list of role and content")
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError("got messages without an assistant's answer")
    return messages


def python_help() -> list[list[Message]]:
    """Python's own help topics as questions and answers: a paragraph's first sentence, then the rest of it."""
    from pydoc_data.topics import topics

    pairs = []
    for topic, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            plain = " ".join(paragraph.split())
            first, _, rest = plain.partition(". ")
            if re.match(r"[A-Z]", plain) and 30 <= len(first) <= 200 and 80 <= len(rest) <= 500:
                question = f'Python\'s help on "{topic}" says: "{first}." What does it say next?'
                pairs.append([{"role": "user", "content": question}, {"role": "assistant", "content": rest}])
    return pairs


@dataclass
class Sample:
    """Token numbers, and which of them are an answer's."""

    tokens: list[int]
    answer: list[bool]


def encode(tokenizer: Any, conversation: list[Message], max_length: int) -> Sample:
    """Render a conversation with the tokenizer's chat template; every assistant turn is an answer."""
    tokens: list[int] = []
    answer: list[bool] = []
    text = ""
    for i, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(conversation[:i], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(conversation[: i + 1], tokenize=False)
        if not before.startswith(text) or not after.startswith(before):
            raise DataError("the chat template does not render a conversation's beginning as the beginning of its text")
        for part, is_answer in ((before[len(text) :], False), (after[len(before) :].rstrip("\n"), True)):
            ids = tokenizer(part, add_special_tokens=False)["input_ids"]
            tokens += ids
            answer += [is_answer] * len(ids)
        text = before + after[len(before) :].rstrip("\n")
    return Sample(tokens[:max_length], answer[:max_length])


class SampleDataset(Dataset):
    """Samples, fetched a batch at a time."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __getitem__(self, indices: list[int]) -> list[Sample]:
        return [self.samples[i] for i in indices]

    def __len__(self) -> int:
        return len(self.samples)


class LengthSortedBatches(Sampler[list[int]]):
    """Batches of samples of similar length, in an order that changes with the epoch.

    Data-parallel ranks get neighbouring batches, so that none waits long for another; the last batch is repeated where
    they do not divide evenly.

    Args:
        lengths: Tokens of each sample.
        batch_size: Samples a batch.
        rank: Data-parallel rank.
        replicas: Data-parallel size.
        seed: Seed of the order; ``None`` keeps it sorted.
    """

    def __init__(self, lengths: list[int], batch_size: int, rank: int, replicas: int, seed: int | None) -> None:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        while len(batches) % replicas:
            batches.append(batches[-1])
        self.steps = [batches[i + rank] for i in range(0, len(batches), replicas)]
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(self.steps)))
        if self.seed is not None:
            random.Random(self.seed + self.epoch).shuffle(order)
        return iter([self.steps[i] for i in order])

    def __len__(self) -> int:
        return len(self.steps)


class ChatDataModule(pl.LightningDataModule):
    """Questions and answers for training and, held out, for validation.

    Args:
        model: Hugging Face directory with the tokenizer.
        data: A .jsonl file; ``None`` is Python's own help topics.
        batch_size: Samples a batch and data-parallel rank.
        max_length: Longer conversations are cut.
        held_out: One sample in so many is held out.
        max_samples: Use only so many, spread over all.
        seed: Seed of the order of batches.
    """

    def __init__(
        self,
        model: str,
        data: str | None = None,
        batch_size: int = 8,
        max_length: int = 256,
        held_out: int = 10,
        max_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.data = data
        self.batch_size = batch_size
        self.max_length = max_length
        self.held_out = held_out
        self.max_samples = max_samples
        self.seed = seed
        self.tokenizer: Any = None
        self.training: list[Sample] = []
        self.validation: list[Sample] = []

    def setup(self, stage: str) -> None:
        """Read, encode and divide the data, once."""
        if self.training:
            return
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        conversations = read_jsonl(Path(self.data)) if self.data else python_help()
        if self.max_samples and len(conversations) > self.max_samples:
            step = len(conversations) / self.max_samples
            conversations = [conversations[int(i * step)] for i in range(self.max_samples)]
        samples = [encode(self.tokenizer, conversation, self.max_length) for conversation in conversations]
        samples = [sample for sample in samples if any(sample.answer[1:])]
        if len(samples) < 2:
            raise DataError(f"fewer than 2 conversations have an answer within max_length={self.max_length} tokens")
        self.validation = samples[:: self.held_out]
        self.training = [sample for i, sample in enumerate(samples) if i % self.held_out]

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches."""
        assert self.trainer is not None
        return self.loader(self.training, self.seed, self.trainer.strategy.parallel)

    def val_dataloader(self) -> DataLoader:
        """The held-out part."""
        assert self.trainer is not None
        return self.loader(self.validation, None, self.trainer.strategy.parallel)

    def loader(self, samples: list[Sample], seed: int | None, parallel: ParallelContext) -> DataLoader:
        """This data-parallel rank's batches of ``samples``."""
        lengths = [len(sample.tokens) for sample in samples]
        batches = LengthSortedBatches(lengths, self.batch_size, parallel.dp_rank, parallel.sizes.data, seed)
        # Sequence parallelism splits the sequence evenly over the tensor-parallel group.
        collate = Collate(pad_token=self.tokenizer.pad_token_id or 0, multiple_of=parallel.sizes.tensor)
        return DataLoader(SampleDataset(samples), batch_size=None, sampler=batches, collate_fn=collate)


@dataclass
class Collate:
    """Pads a batch on the right; causal attention never looks there, and the loss leaves it out."""

    pad_token: int
    multiple_of: int

    def __call__(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Inputs, the next tokens, and 1 where the next token is an answer's: each ``[batch, sequence]``."""
        length = max(len(sample.tokens) for sample in samples) - 1
        length += -length % self.multiple_of
        tokens = torch.full((len(samples), length + 1), self.pad_token)
        mask = torch.zeros(len(samples), length)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
            mask[row, : len(sample.tokens) - 1] = torch.tensor(sample.answer[1:], dtype=torch.float32)
        return {"inputs": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "mask": mask}
