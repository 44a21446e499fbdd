"""SmolLM2-135M-Instruct in Megatron-Core equals transformers on real text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import WorkerPool

pytestmark = pytest.mark.pretrained
TEXT_TOKENS, NEW_TOKENS = 96, 20


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> dict[str, Any]:
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokens = tokenizer(topics["with"], add_special_tokens=False)["input_ids"][:TEXT_TOKENS]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    return {
        "tokens": tokens,
        "prompt": prompt,
        "logits": logits,
        "answer": answer[0, len(prompt) :].tolist(),
        "text": tokenizer.decode(answer[0, len(prompt) :], skip_special_tokens=True),
    }


def _run(directory: str, tp: int, tokens: list[int], prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    from lightning_mcore_lora import build_gpt_model, cpu_backend, generate, load_hf_weights
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    parallel = ParallelContext.create(ParallelSizes(tp, tp, tp > 1))
    seeding.seed_for_init()
    model = build_gpt_model(directory, parallel, perform_initialization=False)
    load_hf_weights(model, directory, parallel)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
    return logits, generate(model, prompt, parallel, max_new_tokens=NEW_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 3])
def test_logits_and_greedy_continuation(workers: WorkerPool, smollm2: Path, reference: dict[str, Any], tp: int) -> None:
    ranks = workers(tp, _run, str(smollm2), tp, reference["tokens"], reference["prompt"])
    logits = torch.cat([rank[0] for rank in ranks], dim=-1)
    assert (logits - reference["logits"]).abs().max() < 1e-3
    assert "Paris" in reference["text"]
    assert all(rank[1] == reference["answer"] for rank in ranks)
