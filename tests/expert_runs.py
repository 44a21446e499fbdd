"""Experts of one layer with adapters in workers, against plain float64 algebra; no dispatcher, no strategy.

The same experts stand in Megatron-Core's ``SequentialMLP``, and in linears that look like Transformer Engine's grouped
ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.moe import values

HIDDEN, FFN, RANK, ALPHA, EXPERTS = 16, 12, 3, 4.5, 4
SCALE = ALPHA / RANK
LEAVES = ("linear_fc1", "linear_fc2")


class _Grouped(nn.Module):
    """A grouped linear without Transformer Engine, with the attributes that it has."""

    def __init__(self, weights: list[Tensor], group: Any) -> None:
        super().__init__()
        for i, weight in enumerate(weights):
            setattr(self, f"weight{i}", nn.Parameter(weight))
        self.num_gemms, self._tp_group = len(weights), group
        self.out_features, self.in_features = weights[0].shape
        self.explicit_expert_comm, self.parallel_mode, self.sequence_parallel = True, None, group.size() > 1

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = [part @ getattr(self, f"weight{i}").T for i, part in enumerate(x.split(m_splits))]
        return torch.cat(parts), None


def _grouped_class(name: str) -> Any:
    cls = type(name, (_Grouped,), {})
    cls.__module__ = "megatron.core.extensions.transformer_engine"
    return cls


def _activate(hidden: Tensor, probs: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return nn.functional.silu(gate) * up * probs[:, None]


def build(parallel: Any, grouped: bool, dtype: torch.dtype = torch.float64) -> Any:
    """A model that holds the experts as ``experts``, each rank its own with their shards."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    from tests.mcore_runs import moe_or_dense_model

    model: Any = moe_or_dense_model(
        parallel,
        num_layers=1,
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        params_dtype=dtype,
    )
    group = parallel_state.get_expert_tensor_parallel_group()
    local = [[shard(weight(leaf, e), leaf, parallel).to(dtype) for leaf in LEAVES] for e in own(parallel)]
    experts = model.decoder.layers[0].mlp.experts
    if not grouped:
        for expert, weights in zip(experts.local_experts, local, strict=True):
            for leaf, value in zip(LEAVES, weights, strict=True):
                getattr(expert, leaf).weight.data.copy_(value)
        return experts

    class GroupedMLP(MegatronModule):
        def forward(self, x: Tensor, sizes: Tensor, probs: Tensor) -> tuple[Tensor, None]:
            sizes = sizes.tolist()
            hidden, _ = self.linear_fc1(x, sizes)
            return self.linear_fc2(_activate(hidden, probs), sizes)

    holder = GroupedMLP(model.config)
    for i, (leaf, kind) in enumerate(zip(LEAVES, ("Column", "Row"), strict=True)):
        cls = _grouped_class(f"TE{kind}ParallelGroupedLinear")
        setattr(holder, leaf, cls([weights[i] for weights in local], group))
    return holder


def own(parallel: Any) -> range:
    """Numbers of this rank's experts."""
    each = EXPERTS // parallel.sizes.expert
    return range(each * parallel.ep_rank, each * (parallel.ep_rank + 1))


def weight(leaf: str, expert: int) -> Tensor:
    """The whole weight of one expert."""
    shape = (2 * FFN, HIDDEN) if leaf == "linear_fc1" else (HIDDEN, FFN)
    generator = torch.Generator().manual_seed(10 * expert + LEAVES.index(leaf))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4


def shard(tensor: Tensor, leaf: str, parallel: Any, dim: int | None = None) -> Tensor:
    """This rank's part of a whole weight's rows (gate's and up's each) or columns."""
    blocks = tensor.chunk(2, 0) if leaf == "linear_fc1" else (tensor,)
    dim = (0 if leaf == "linear_fc1" else 1) if dim is None else dim
    size = parallel.sizes.expert_tensor
    return torch.cat([block.chunk(size, dim)[parallel.etp_rank] for block in blocks], dim)


def whole_factors(adapter: Any) -> dict[str, Tensor]:
    """Whole values of an adapter's parameters, with the experts of all ranks."""
    width = len(adapter.plan.parts) * RANK
    shapes = {"a": (width, adapter.site.d_in), "b": (adapter.site.d_out, RANK), "magnitude": (adapter.site.d_out,)}
    whole = {}
    for name, parameter in adapter.named_parameters():
        lead = (EXPERTS,) if parameter.dim() > len(shapes[name]) else ()
        whole[name] = values(f"{adapter.site.leaf}.{name}", lead + shapes[name]).double()
    return whole


class Oracle:
    """Plain algebra over all experts, with their factors as leaves.

    Args:
        factors: Whole factors by linear.
    """

    def __init__(self, factors: dict[str, dict[str, Tensor]]) -> None:
        self.factors = {
            leaf: {n: t.clone().requires_grad_() for n, t in held.items()} for leaf, held in factors.items()
        }

    def delta(self, leaf: str, expert: int) -> Tensor:
        """``s B A`` of one expert."""
        a, b = (t[expert] if t.dim() == 3 else t for t in (self.factors[leaf]["a"], self.factors[leaf]["b"]))
        pairs = zip(b.chunk(len(a) // RANK), a.chunk(len(a) // RANK), strict=True)
        return SCALE * torch.cat([rows @ part for rows, part in pairs])

    def merged(self, leaf: str, expert: int) -> Tensor:
        """The weight with the adapter in it."""
        return self.linear(torch.eye(weight(leaf, expert).shape[1], dtype=torch.float64), leaf, expert, None).T

    def linear(self, x: Tensor, leaf: str, expert: int, mask: Tensor | None) -> Tensor:
        """One linear of one expert."""
        delta = self.delta(leaf, expert)
        y = x @ weight(leaf, expert).T + (x if mask is None else x * mask) @ delta.T
        magnitude = self.factors[leaf].get("magnitude")
        if magnitude is not None:
            y = y * (magnitude[expert] / (weight(leaf, expert) + delta).norm(dim=1).detach())
        return y

    def expert(self, x: Tensor, probs: Tensor, expert: int, masks: tuple[Tensor, Tensor] | None) -> Tensor:
        """One expert."""
        first, second = masks or (None, None)
        return self.linear(_activate(self.linear(x, "linear_fc1", expert, first), probs), "linear_fc2", expert, second)


def errors(
    layout: tuple[int, int, int], grouped: bool, sizes: Sequence[int], lora: dict[str, Any], dtype: str = "float64"
) -> dict[str, float]:
    """Relative errors on this rank of output, dX, dA, dB, magnitudes' gradients and merged weights.

    Args:
        layout: TP, EP, ETP.
        grouped: Whether one linear holds all experts.
        sizes: Tokens of each of all experts.
        lora: Fields of ``LoRAConfig``.
        dtype: Of activations and factors.
    """
    from megatron.core import parallel_state

    from lightning_mcore_lora import LoRAConfig, apply_lora, cpu_backend
    from lightning_mcore_lora.adapters import adapters, merged_weights, products
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    tp, ep, etp = layout
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, tp > 1, ep, etp))
    seeding.seed_for_init()
    real = getattr(torch, dtype)
    model = build(parallel, grouped, real)
    apply_lora(model, LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=LEAVES, **lora))
    model.to(real)
    beside = {adapter.site.leaf: adapter for _, adapter in adapters(model)}
    whole = {leaf: whole_factors(adapter) for leaf, adapter in beside.items()}
    for leaf, adapter in beside.items():
        adapter.load_full(**whole[leaf])
    seeding.seed_for_training(parallel)
    mine = list(own(parallel))
    generator = torch.Generator().manual_seed(3)
    total = sum(sizes)
    x_all, grad_all = (torch.randn(total, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    probs_all = torch.rand(total, generator=generator, dtype=torch.float64)

    def of(tensor: Tensor, experts: Sequence[int]) -> Tensor:
        parts = tensor.split(list(sizes))
        return torch.cat([parts[e] for e in experts])

    x = of(x_all, mine).to(real).requires_grad_()
    local_sizes = torch.tensor([sizes[e] for e in mine])
    drawn: list[Any] = []
    draw = products.Dropout.draw
    products.Dropout.draw = lambda *args: drawn.append(draw(*args)) or drawn[-1]  # type: ignore[method-assign, assignment, misc, return-value, func-returns-value]
    try:
        output, _ = model(x, local_sizes, of(probs_all, mine).to(real))
    finally:
        products.Dropout.draw = draw  # type: ignore[method-assign]
    output.backward(of(grad_all, mine).to(real))
    masks = _masks(drawn, grouped, [sizes[e] for e in mine], mine, parallel, lora.get("dropout", 0.0))

    oracle, x_all = Oracle(whole), x_all.requires_grad_()
    parts = zip(x_all.split(list(sizes)), probs_all.split(list(sizes)), strict=True)
    expected = torch.cat([oracle.expert(*part, e, masks.get(e)) for e, part in enumerate(parts)])
    expected.backward(grad_all)
    group = parallel_state.get_expert_tensor_parallel_group()
    got = {"y": output.detach().double(), "dx": x.grad.double()}  # the dispatcher sums them over the group
    for value in got.values():
        torch.distributed.all_reduce(value, group=group)
    want = {"y": of(expected.detach(), mine), "dx": of(x_all.grad, mine)}
    for leaf, adapter in beside.items():
        for name, leaf_tensor in oracle.factors[leaf].items():
            want[f"{leaf} {name}"] = adapter._shard(adapter._local(leaf_tensor.grad, name), name)
            got[f"{leaf} {name}"] = getattr(adapter, name).grad
        merged = torch.stack([shard(oracle.merged(leaf, e).detach(), leaf, parallel) for e in mine])
        want[f"{leaf} merged"], got[f"{leaf} merged"] = merged, torch.stack(merged_weights(adapter))
    found = {}
    for name, value in want.items():
        assert got[name] is not None, f"{name}: not connected"
        assert got[name].shape == value.shape, name
        if value.numel():
            found[name] = ((got[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)).item()
    return found


def _masks(
    drawn: list[Any], grouped: bool, sizes: list[int], mine: list[int], parallel: Any, p: float
) -> dict[int, tuple[Tensor, Tensor]]:
    """Masks of every expert over all its features, scaled; checks that they agree where they must, and only there."""
    if not drawn:
        return {}
    from megatron.core import parallel_state

    widths = (HIDDEN, FFN // parallel.sizes.expert_tensor)
    if grouped:
        first, second = (d(torch.ones(sum(sizes), width)).split(sizes) for d, width in zip(drawn, widths, strict=True))
    else:
        first, second = (
            [d(torch.ones(n, width)) for d, n in zip(drawn[i::2], sizes, strict=True)] for i, width in enumerate(widths)
        )
    held: list[Any] = [None] * parallel.sizes.expert_tensor
    ours = {e: (first[i], second[i]) for i, e in enumerate(mine)}
    torch.distributed.all_gather_object(held, ours, group=parallel_state.get_expert_tensor_parallel_group())
    for e in mine:
        for peer in held:
            assert torch.equal(peer[e][0], held[0][e][0]), "peers see the same tokens"
            if peer is not held[0] and peer[e][1].numel() > 40:
                assert not torch.equal(peer[e][1], held[0][e][1]), "peers hold other features"
    every: list[Any] = [None] * torch.distributed.get_world_size()
    mine_whole = {e: (held[0][e][0], torch.cat([peer[e][1] for peer in held], 1)) for e in mine}
    torch.distributed.all_gather_object(every, mine_whole)
    whole = {e: pair for part in every for e, pair in part.items()}
    big = [pair[0].flatten()[:40] for pair in whole.values() if pair[0].numel() >= 40]
    assert len({tuple(mask.tolist()) for mask in big}) == len(big), "experts have masks of their own"
    return {e: tuple(m.double() / (1 - p) for m in pair) for e, pair in whole.items()}  # type: ignore[misc]


def cost(layout: tuple[int, int, int], grouped: bool, lora: dict[str, Any]) -> dict[str, int]:
    """What adapters add on this rank to a forward and backward of equally many tokens for each expert, and predicted.

    Sums of weights' gradients are the strategy's, once a step, and counted apart.
    """
    from benchmarks.counting import Collectives, kept_for_backward
    from lightning_mcore_lora import LoRAConfig, apply_lora, cpu_backend
    from lightning_mcore_lora.adapters import adapters
    from lightning_mcore_lora.adapters.cost import predict
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding
    from lightning_mcore_lora.strategy.gradients import GradientReducer
    from lightning_mcore_lora.strategy.precision import Masters

    cpu_backend.apply()
    tp, ep, etp = layout
    world, each = torch.distributed.get_world_size(), 6
    parallel = ParallelContext.create(ParallelSizes(world, tp, tp > 1, ep, etp))
    seeding.seed_for_init()
    model = build(parallel, grouped, torch.float32).requires_grad_(False)
    sizes = torch.tensor([each] * (EXPERTS // ep))
    x = torch.randn(int(sizes.sum()), HIDDEN, requires_grad=True)

    def run() -> tuple[int, list[Any], int]:
        own_storages = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        probs = torch.rand(len(x))
        own_storages.add(probs.untyped_storage().data_ptr())
        with Collectives() as collectives, kept_for_backward(own_storages) as kept:
            output, _ = model(x * 1.0, sizes, probs)
            kept_bytes = kept()
            output.sum().backward()
        return kept_bytes, collectives.seen, collectives.sent()

    floor = run()[0]
    config = LoRAConfig(rank=4, target_modules=LEAVES, **lora)
    apply_lora(model, config)
    reducer = GradientReducer(model, parallel, Masters())
    kept, seen, sent = run()
    with Collectives() as at_end:
        reducer._sum_experts()
    reducer.close()
    # A token goes to two experts; these tokens came from EP * ETP / TP microbatches.
    microbatch = len(x) * tp // (2 * etp)
    sizes_now = ParallelContext.current().sizes
    costs = (predict(adapter.site, adapter.plan, config, sizes_now) for _, adapter in adapters(model))
    total = sum(costs, start=_no_cost())
    return {
        "kept": kept - floor,
        "predicted kept": total.kept(microbatch),
        "collectives": len(seen),
        "sent": sent,
        "predicted sent": total.sent(microbatch) - round(total.sent_per_step),
        "sent per step": at_end.sent(),
        "predicted per step": round(total.sent_per_step),
    }


def _no_cost() -> Any:
    from lightning_mcore_lora.adapters.cost import Cost

    return Cost()
