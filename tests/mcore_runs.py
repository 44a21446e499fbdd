"""Plain Megatron-Core runs in workers: no Lightning, no adapters."""

import zlib
from collections.abc import Callable
from typing import Any

import torch

from lightning_mcore_lora.models.gpt import build_gpt_model
from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
from lightning_mcore_lora.strategy import seeding
from lightning_mcore_lora.strategy.gradients import GradientReducer, global_grad_norm
from lightning_mcore_lora.strategy.precision import Masters
from tests import moe_runs

VOCAB, SEQUENCE, BATCH = 64, 8, 2


def moe_or_dense_model(parallel: ParallelContext, vocab_size: int = VOCAB, **config: Any) -> torch.nn.Module:
    """A two-layer GPT from a TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    fields = {
        "num_layers": 2,
        "hidden_size": 24,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "init_method_std": 0.2,
    }
    if config.get("recompute_granularity") == "full":
        config = {"recompute_method": "uniform", "recompute_num_layers": 1} | config
    if not config.get("num_moe_experts"):
        fields = {name: value for name, value in fields.items() if not name.startswith("moe_")}
    return build_gpt_model(
        TransformerConfig(**(fields | config)), parallel, vocab_size=vocab_size, max_sequence_length=SEQUENCE
    )


def model_at(tp: int, sequence: bool | None = None, **config: Any) -> tuple[Any, ParallelContext]:
    """A model on fresh groups of this world; ETP is TP, and sequence parallelism is on when TP > 1."""
    from lightning_mcore_lora import cpu_backend

    cpu_backend.apply()
    sequence = tp > 1 if sequence is None else sequence
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, sequence, 1, tp))
    seeding.seed_for_init()
    return moe_or_dense_model(parallel, **config), parallel


def forward_backward(
    tp: int, ep: int, etp: int | None, autocast: bool = False, frozen: bool = False, **config: Any
) -> dict[str, Any]:
    """Loss and gradients of one step.

    Returns:
        The loss, and by name this rank's gradients with their marks.
    """
    world = torch.distributed.get_world_size()
    parallel = ParallelContext.create(ParallelSizes(world, tp, tp > 1, ep, tp if etp is None else etp))
    seeding.seed_for_init()
    model = moe_or_dense_model(parallel, **config)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embedding" in name)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(SEQUENCE)[None].expand_as(ids)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids, positions, None, labels=ids.roll(-1, 1)).float().mean()
    loss.backward()
    return {
        "loss": loss.item(),
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


def fill_by_name(
    model: torch.nn.Module, parallel: ParallelContext, delta: Callable[[str], torch.Tensor | None] = lambda name: None
) -> None:
    """Weights that depend on a parameter's place in the whole model only, not on the layout; ``delta`` is added."""
    from megatron.core import parallel_state

    for name, parameter in model.named_parameters():
        sharded = getattr(parameter, "tensor_model_parallel", False)
        is_expert = ".experts." in name
        rank, size = parallel.tp_rank, parallel.sizes.tensor
        if is_expert:
            rank, size = parallel_state.get_expert_tensor_parallel_rank(), parallel.sizes.expert_tensor
        shape = list(parameter.shape)
        dim = parameter.partition_dim if sharded else 0
        shape[dim] *= size if sharded else 1
        whole_name = _global_name(name, model.config, parallel)
        generator = torch.Generator().manual_seed(zlib.crc32(whole_name.encode()))
        full = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
        added = delta(whole_name)
        full = full if added is None else full + added
        blocks = full.chunk(2, 0) if "linear_fc1" in name else [full]
        with torch.no_grad():
            parameter.copy_(torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim) if sharded else full)


def _global_name(name: str, config: Any, parallel: ParallelContext) -> str:
    from megatron.core import parallel_state

    if "local_experts" not in name:
        return name
    each = config.num_moe_experts // parallel.sizes.expert
    head, _, tail = name.partition("local_experts.")
    number, _, tail = tail.partition(".")
    return f"{head}local_experts.{int(number) + each * parallel_state.get_expert_model_parallel_rank()}.{tail}"


def reduced_step(
    tp: int,
    ep: int,
    etp: int,
    microbatches: int = 1,
    by_tokens: bool = False,
    prepare: Callable[[Any, ParallelContext], None] = fill_by_name,
    **config: Any,
) -> dict[str, Any]:
    """One step through Megatron-Core's DDP: the loss, and each whole gradient by its name in the whole model.

    With several microbatches the same batch is taken again; ``by_tokens`` returns summed losses with their tokens.
    ``prepare`` gives the model its weights, and adapters.
    """
    from megatron.core import parallel_state

    from lightning_mcore_lora import cpu_backend

    cpu_backend.apply()
    world = torch.distributed.get_world_size()
    parallel = ParallelContext.create(ParallelSizes(world, tp, tp > 1, ep, etp))
    seeding.seed_for_init()
    model = moe_or_dense_model(parallel, **config)
    prepare(model, parallel)
    reducer = GradientReducer(model, parallel, Masters())
    seeding.seed_for_init()
    ids = torch.randint(0, VOCAB, (4, SEQUENCE), generator=torch.Generator().manual_seed(5))
    ids = ids.chunk(parallel.sizes.data)[parallel.dp_rank]
    positions = torch.arange(SEQUENCE)[None].expand_as(ids)
    for _ in range(microbatches):
        losses = model(ids, positions, None, labels=ids.roll(-1, 1))
        loss = losses.mean()
        # The loss is divided as the Trainer does it.
        value, tokens = (losses.sum(), ids.numel()) if by_tokens else (loss, None)
        reducer.before_backward(value / microbatches, tokens, microbatches).backward()
        reducer.after_backward()
    reducer.finalize()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        sharded = getattr(parameter, "tensor_model_parallel", False)
        rank = parallel_state.get_expert_tensor_parallel_rank() if ".experts." in name else parallel.tp_rank
        dim = parameter.partition_dim if sharded else None
        gradients[_global_name(name, model.config, parallel)] = (rank, dim, parameter.grad.clone())
    norm = global_grad_norm([p for p in model.parameters() if p.requires_grad]).item()
    reducer.close()  # its hooks would hold the model, and the model its groups
    adapted = {name: p for name, p in model.named_parameters() if ".lora." in name}
    places = moe_runs.places(adapted, parallel)
    return {"loss": loss.item(), "gradients": gradients, "norm": norm, **places}


def whole_gradients(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Put the shards of :func:`reduced_step` together."""
    shards: dict[str, dict[int, tuple[int | None, torch.Tensor]]] = {}
    for result in ranks:
        for name, (rank, dim, value) in result["gradients"].items():
            shards.setdefault(name, {})[rank] = (dim, value)
    whole = {}
    for name, by_rank in shards.items():
        dim = by_rank[0][0]
        values = [by_rank[rank][1] for rank in sorted(by_rank)]
        if dim is None:
            whole[name] = values[0]
            continue
        parts = [value.chunk(2, dim) if "linear_fc1" in name else [value] for value in values]
        whole[name] = torch.cat([part[i] for i in range(len(parts[0])) for part in parts], dim)
    return whole
