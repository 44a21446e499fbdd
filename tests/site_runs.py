"""One linear with an adapter in workers, against plain float64 algebra in the same process."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.counting import Collectives, kept_for_backward
from lightning_mcore_lora.adapters.placement import Around

SEQUENCE, BATCH, D_IN, D_OUT, RANK, ALPHA = 12, 3, 96, 96, 6, 9.0
NAMES = {"column": "linear_fc1", "row": "linear_fc2", "duplicated": "gate"}


@dataclass
class Site:
    """A linear with the whole values of its parameters, and what the values are shared over."""

    linear: Any
    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    magnitude: Tensor
    parallel: Any


def build(
    kind: str,
    tp: int,
    around: Around,
    mode: str | None,
    rank: int = RANK,
    bias: bool = False,
    gather_output: bool = False,
    **lora: Any,
) -> Site:
    """A linear with random nonzero factors; ``mode=None`` is the frozen base alone."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    from lightning_mcore_lora import LoRAConfig, apply_lora, cpu_backend
    from lightning_mcore_lora.adapters import adapters
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
    sequence = around is Around.SEQUENCE
    bias = bias and not (around is Around.REMOVED and kind == "row")  # Megatron-Core adds none to a partial output
    parallel = ParallelContext.create(ParallelSizes(torch.distributed.get_world_size(), tp, sequence))
    seeding.seed_for_init()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D_IN,
        num_attention_heads=6,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        gated_linear_unit=True,
        add_bias_linear=False,
    )
    options = {"config": config, "init_method": nn.init.normal_, "bias": bias, "skip_bias_add": not bias}
    linear: Any
    if kind == "column":
        linear = ColumnParallelLinear(D_IN, D_OUT, gather_output=gather_output, **options)
    elif kind == "row":
        linear = RowParallelLinear(D_IN, D_OUT, input_is_parallel=True, **options)
    else:
        linear = nn.Linear(D_IN, D_OUT, bias=bias, dtype=torch.float64)
        linear.weight.sequence_parallel = sequence
    if around is Around.REMOVED:
        linear.explicit_expert_comm = True
    generator = torch.Generator().manual_seed(1)
    stacked = 2 * rank if lora.get("canonical") and kind == "column" else rank
    weight, a, b, offset, magnitude = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((D_OUT, D_IN), (stacked, D_IN), (D_OUT, rank), (D_OUT,), (D_OUT,))
    )
    with torch.no_grad():
        linear.weight.copy_(held(weight, kind, parallel, {"column": 0, "row": 1}.get(kind)))
        if bias:
            linear.bias.copy_(held(offset, kind, parallel, {"column": 0}.get(kind)))
    holder = MegatronModule(config)
    setattr(holder, NAMES[kind], linear)
    if mode is None:
        holder.requires_grad_(False)
    else:
        settings = LoRAConfig(rank=rank, alpha=ALPHA, target_modules=(NAMES[kind],), sequence_mode=mode, **lora)
        apply_lora(holder, settings)
        holder.double()
        for _, adapter in adapters(holder):
            adapter.load_full(a, b, magnitude)
    return Site(linear, weight, offset if bias else None, a, b, magnitude, parallel)


def held(tensor: Tensor, kind: str, parallel: Any, dim: int | None) -> Tensor:
    """This rank's share of a dimension of features; of a column linear's outputs, gate and up, of each its part."""
    if dim is None:
        return tensor
    each = tensor.chunk(2, dim) if kind == "column" else (tensor,)
    return torch.cat([part.chunk(parallel.sizes.tensor, dim)[parallel.tp_rank] for part in each], dim)


def features(tensor: Tensor, parallel: Any, dim: int) -> Tensor:
    """This rank's share of a dimension in one piece."""
    return tensor.chunk(parallel.sizes.tensor, dim)[parallel.tp_rank]


def oracle(site: Site, kind: str, x: Tensor, grad: Tensor, mask: Tensor | None, **lora: Any) -> dict[str, Tensor]:
    """Output and gradients of ``x (W + s B A)^T``, whole, by autograd in float64."""
    x, a, b, m = (t.clone().requires_grad_() for t in (x, site.a, site.b, site.magnitude))
    rank = b.shape[1]
    scale = ALPHA / (rank**0.5 if lora.get("rslora") else rank)
    count = len(a) // rank  # of gate and up in one: gate rows read the first A, up rows the second
    delta = scale * torch.cat([part @ rows for part, rows in zip(b.chunk(count), a.chunk(count), strict=True)])
    y = x @ site.weight.T + (x if mask is None else x * mask) @ delta.T
    if lora.get("dora"):
        y = y * (m / (site.weight + delta).norm(dim=1).detach())
    if site.bias is not None:
        y = y + site.bias
    y.backward(grad)
    grads = {"dx": x.grad, "da": a.grad, "db": b.grad} | ({"dm": m.grad} if lora.get("dora") else {})
    return {"y": y.detach(), **grads}  # type: ignore[dict-item]


def errors(kind: str, tp: int, around: Around, mode: str, rank: int = RANK, **options: Any) -> dict[str, float]:
    """Relative errors of output, dX, dA, dB and of the magnitude's gradient on this rank."""
    from lightning_mcore_lora.adapters import products

    site = build(kind, tp, around, mode, rank, **options)
    parallel, lora = site.parallel, site.linear.lora
    sequence, removed = around is Around.SEQUENCE, around is Around.REMOVED
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(SEQUENCE, BATCH, width, generator=generator, dtype=torch.float64) for width in (D_IN, D_OUT))

    def shard(tensor: Tensor) -> Tensor:
        return features(tensor, parallel, 0) if sequence else tensor

    local = features(x, parallel, 2) if kind == "row" else shard(x)
    local = local.clone().requires_grad_()
    drawn: list[Any] = []
    draw = products.Dropout.draw
    products.Dropout.draw = lambda *args: drawn.append(draw(*args)) or drawn[-1]  # type: ignore[method-assign, assignment, misc, return-value, func-returns-value]
    try:
        result = site.linear(local)
    finally:
        products.Dropout.draw = draw  # type: ignore[method-assign]
    out = result if kind == "duplicated" else result[0]
    mask = _whole_mask(drawn[0], kind, parallel, sequence, mode, lora.config.dropout) if drawn else None
    expected = oracle(site, kind, x, grad, mask, **options)
    full_output = options.get("gather_output")
    if kind != "column":
        place = shard
    elif full_output:
        place = lambda tensor: tensor  # noqa: E731
    else:
        place = lambda tensor: held(tensor, kind, parallel, 2)  # noqa: E731
    if full_output:  # Megatron-Core's gather leaves gate and up of each rank side by side
        order = torch.arange(D_OUT).view(2, tp, -1).transpose(0, 1).flatten()
        grad, expected["y"] = grad[..., order], expected["y"][..., order]
    out.backward(place(grad))
    expected |= (
        {"y": place(expected["y"]), "dx": features(expected["dx"], parallel, 2)}
        if kind == "row"
        else {
            "y": place(expected["y"]),
            "dx": shard(expected["dx"]),
        }
    )
    placement = lora.plan.placement
    expected["da"] = (
        expected["da"] if placement.a.dim() is None else features(expected["da"], parallel, placement.a.dim())
    )
    for name in ("db", "dm"):
        if name in expected:
            expected[name] = held(expected[name], kind, parallel, placement.b.dim())
    got = {"y": out.detach(), "dx": local.grad, "da": lora.a.grad, "db": lora.b.grad}
    if removed:  # whoever runs the linear sums what is left partial
        torch.distributed.all_reduce(got["dx" if kind == "column" else "y"], group=parallel.tp_group)
    if "dm" in expected:
        got["dm"] = lora.magnitude.grad
    if options.get("freeze_a"):
        assert got.pop("da") is None
        del expected["da"]
    assert site.linear.weight.grad is None
    return {name: ((got[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected}


def _whole_mask(drawn: Any, kind: str, parallel: Any, sequence: bool, mode: str, p: float) -> Tensor:
    """The masks of all ranks put together; they agree where all see the same activations, and nowhere else."""
    shape, dim = [SEQUENCE, BATCH, D_IN], None
    if kind == "row":
        dim = 2
    elif sequence and (kind == "duplicated" or mode != "gather"):
        dim = 0
    if dim is not None:
        shape[dim] //= parallel.sizes.tensor
    mine = drawn(torch.ones(shape, dtype=torch.float64))
    assert abs(mine.mean().item() - (1 - p)) < 0.05
    masks: list[Any] = [None] * parallel.sizes.tensor
    torch.distributed.all_gather_object(masks, mine, group=parallel.tp_group)
    for i, other in enumerate(masks):
        assert torch.equal(mine, other) == (dim is None or i == parallel.tp_rank)
    return (mine if dim is None else torch.cat(masks, dim)) / (1 - p)


def cost(kind: str, tp: int, around: Around, mode: str | None, **options: Any) -> dict[str, Any]:
    """Bytes kept for backward and collectives of one forward and backward, and what the report predicts."""
    from lightning_mcore_lora.adapters.config import DTYPES
    from lightning_mcore_lora.adapters.cost import predict
    from lightning_mcore_lora.parallel import ParallelContext

    site = build(kind, tp, around, mode, **options)
    shape = [SEQUENCE, BATCH, D_IN]
    shape[0] //= tp if kind != "row" and around is Around.SEQUENCE else 1
    shape[2] //= tp if kind == "row" else 1
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in site.linear.parameters()}
    if mode is not None:
        site.linear.lora.defer_sums(True)
    with Collectives() as collectives, kept_for_backward(parameters) as kept:
        result = site.linear(x * 1.0)  # a non-leaf, so that the input itself is not held by the test
        out = result if kind == "duplicated" else result[0]
        kept_bytes = kept()
        out.sum().backward()
    counted = {"kept": kept_bytes, "wide": collectives.wide(SEQUENCE * BATCH * D_IN), "all": len(collectives.seen)}
    counted["sent"] = collectives.sent()
    if mode is not None:
        adapter, tokens = site.linear.lora, SEQUENCE * BATCH
        with pytest.MonkeyPatch.context() as patch:  # the factors were made float64, which no setting does
            patch.setitem(DTYPES, "float32", adapter.a.dtype)
            predicted = predict(adapter.site, adapter.plan, adapter.config, ParallelContext.current().sizes)
        per_step = round(predicted.sent_per_step)
        counted |= {
            "predicted kept": predicted.kept(tokens),
            "predicted sent": predicted.sent(tokens) - per_step,
            "per step": per_step,
        }
    return counted
