"""The example's data: what is learnt, how it is batched, what a bad line says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from chat_data import Collate, DataError, LengthSortedBatches, Sample, encode, python_help, read_jsonl


class Tokenizer:
    """One token a character; the template marks turns as ChatML does."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool = False) -> str:
        text = "".join(f"<{m['role']}>{m['content']}<end>\n" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


def test_only_answers_are_learnt() -> None:
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "more"), ("assistant", "yes")]
    sample = encode(Tokenizer(), [{"role": r, "content": c} for r, c in turns], 1000)
    text = "".join(map(chr, sample.tokens))
    learnt = "".join(chr(t) for t, answer in zip(sample.tokens, sample.answer, strict=True) if answer)
    assert text == "<user>hi<end>\n<assistant>hello<end>\n<user>more<end>\n<assistant>yes<end>"
    assert learnt == "hello<end>yes<end>"
    assert len(encode(Tokenizer(), [{"role": r, "content": c} for r, c in turns], 10).tokens) == 10


def test_padding_is_a_multiple_and_not_learnt() -> None:
    batch = Collate(pad_token=9, multiple_of=3)(
        [Sample([1, 2, 3, 4, 5], [False, False, True, True, True]), Sample([6, 7], [False, True])]
    )
    assert batch["inputs"].shape == (2, 6)
    assert batch["inputs"].tolist()[1] == [6, 7, 9, 9, 9, 9]
    assert batch["labels"].tolist()[0] == [2, 3, 4, 5, 9, 9]
    assert batch["mask"].tolist() == [[0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_batches_are_sorted_shuffled_and_divided() -> None:
    lengths = torch.randint(5, 100, (37,), generator=torch.Generator().manual_seed(0)).tolist()
    ranks = [LengthSortedBatches(lengths, 4, rank, 2, seed=1) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 5
    seen = [[list(batch) for batch in rank] for rank in ranks]
    assert {i for rank in seen for batch in rank for i in batch} == set(range(37))
    for one, other in zip(*seen, strict=True):
        spread = max(lengths[i] for i in one + other) - min(lengths[i] for i in one + other)
        assert spread <= 25, "ranks work on neighbouring lengths at the same step"
    ranks[0].set_epoch(1)
    assert [list(batch) for batch in ranks[0]] != seen[0]
    assert sorted(map(tuple, ranks[0])) == sorted(map(tuple, seen[0]))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"prompt": "a", "completion": ', "line 2: .*expected"),
        ("[1]", "line 2: got list; expected"),
        ('{"prompt": "a", "answer": "b"}', r"line 2: got the keys \['answer', 'prompt'\]; expected"),
        ('{"messages": [{"role": "user"}]}', "line 2: got messages that are not a list of role and content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: got messages without an assistant's answer"),
    ],
)
def test_a_malformed_line_gives_its_number(tmp_path: Path, line: str, match: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=match):
        read_jsonl(file)


def test_both_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    assert read_jsonl(file) == [messages, messages]
    file.write_text("")
    with pytest.raises(DataError, match="holds no line"):
        read_jsonl(file)


def test_python_help_is_real_text() -> None:
    pairs = python_help()
    assert len(pairs) > 300
    assert all(answer["content"] for _, answer in pairs)
