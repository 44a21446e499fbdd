"""What a real model holds and keeps, beside what is estimated for it; runs in workers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.counting import kept_for_backward
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes

VOCAB = 99  # odd: padded at TP=2


class Forward:
    """Forwards of one microbatch, and what they keep."""

    def __init__(self, model: Any, batch: int, sequence: int, seed: int, mixed: bool) -> None:
        self.model, self.mixed = model, mixed
        self.ids = torch.randint(0, VOCAB, (batch, sequence), generator=torch.Generator().manual_seed(seed))
        self.positions = torch.arange(sequence)[None].expand_as(self.ids)

    def __call__(self) -> Tensor:
        """The loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            return self.model(self.ids, self.positions, None, labels=self.ids.roll(-1, 1)).mean()

    def kept(self) -> int:
        """Bytes kept for backward."""
        own = (*self.model.parameters(), *self.model.buffers(), self.ids)
        with kept_for_backward({t.untyped_storage().data_ptr() for t in own}) as kept:
            loss = self()
            count = kept()
        loss.backward()
        return count


def counted(
    layout: tuple[int, int, int],
    sequence_parallel: bool,
    config: dict[str, Any],
    lora: dict[str, Any],
    batch: int,
    sequence: int,
    precision: str = "32-true",
) -> dict[str, Any]:
    """Bytes of this rank as they are counted, and as they are estimated."""
    from megatron.core.transformer import TransformerConfig

    from lightning_mcore_lora import LoRAConfig, apply_lora, build_gpt_model, cpu_backend, estimate_memory
    from lightning_mcore_lora.adapters import adapters
    from lightning_mcore_lora.memory.estimate import PRECISIONS
    from lightning_mcore_lora.strategy import seeding
    from lightning_mcore_lora.strategy.gradients import GradientReducer
    from lightning_mcore_lora.strategy.precision import Masters, mend_autocast

    cpu_backend.apply()
    mend_autocast()
    tp, ep, etp = layout
    sizes = ParallelSizes(torch.distributed.get_world_size(), tp, sequence_parallel, ep, etp)
    parallel = ParallelContext.create(sizes)
    seeding.seed_for_init()
    fields = config | {"params_dtype": PRECISIONS[precision].weights}
    model = build_gpt_model(TransformerConfig(**fields), parallel, vocab_size=VOCAB, max_sequence_length=sequence)
    forward = Forward(model, batch, sequence, parallel.dp_rank, precision == "bf16-mixed")
    base = _bytes(model.parameters())
    model.requires_grad_(False)
    whole = model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    forward.kept()  # caches are filled
    floor = forward.kept()
    settings = LoRAConfig(**lora)
    report = apply_lora(model, settings, PRECISIONS[precision].activations)
    with_adapters = forward.kept()
    whole.remove()
    model.zero_grad()

    masters = Masters()
    masters.stand_for(p for p in model.parameters() if p.requires_grad)
    reducer = GradientReducer(model, parallel, masters)
    trained = [masters.of(p) for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    reducer.before_backward(forward(), None).backward()
    reducer.after_backward()
    reducer.finalize()
    optimizer.step()
    reducer.clear()
    buffers = (*reducer._ddp.buffers, *reducer._ddp.expert_parallel_buffers)
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if value.dim()]
    held = {
        "base weights": base,
        "adapter weights": _bytes(p for _, a in adapters(model) for p in a.parameters()),
        "float32 masters": _bytes(p for p in trained if not any(p is q for q in model.parameters())),
        "gradients": _bytes(b.grad_data for b in buffers),
        "optimizer state": _bytes(state),
    }
    reducer.close()
    estimate = estimate_memory(
        TransformerConfig(**fields),
        sizes,
        sequence_length=sequence,
        micro_batch_size=batch,
        precision=precision,
        lora=settings,
        accelerator="cpu",
        vocab_size=VOCAB,
    )
    return {
        "held": held,
        "kept": forward.kept(),
        "kept by adapters": with_adapters - floor,
        "costs": {site.site: site.cost for site in report.sites if site.mode and site.placement},
        "estimate": estimate,
    }


def parameters(directories: dict[str, str], layout: tuple[int, int, int]) -> dict[str, tuple[dict, dict]]:
    """Name to elements of each parameter, of the model and of its skeleton, by family."""
    from lightning_mcore_lora import build_gpt_model, cpu_backend
    from lightning_mcore_lora.memory.skeleton import build_skeleton
    from lightning_mcore_lora.models.described import describe, transformer_config
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    tp, ep, etp = layout
    sizes = ParallelSizes(torch.distributed.get_world_size(), tp, tp > 1, ep, etp)
    parallel = ParallelContext.create(sizes)
    seeding.seed_for_init()
    found = {}
    for name, directory in directories.items():
        model = build_gpt_model(directory, parallel, perform_initialization=False)
        described = describe(directory)
        config = transformer_config(described.fields, sizes, False)
        skeleton = build_skeleton(config, sizes, "local", described.vocab_size, described.tied)
        found[name] = _elements(model), _elements(skeleton)
    return found


def _elements(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
