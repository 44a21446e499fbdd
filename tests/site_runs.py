"""One linear with an adapter in workers, against plain float64 algebra in the same process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SEQUENCE, BATCH, D_IN, D_OUT, RANK, ALPHA = 12, 3, 96, 96, 6, 9.0
BASE_NAMES = {"column": "linear_fc1", "row": "linear_fc2"}


class Collectives(TorchDispatchMode):
    """Records each collective: its name and the elements of its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            sizes = [tensor.numel() for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, Tensor)]
            self.seen.append((func.__name__.partition(".")[0], max(sizes)))
        return func(*args, **(kwargs or {}))

    def wide(self) -> int:
        """Collectives of the input's width."""
        return sum(size >= SEQUENCE * BATCH * D_IN for _, size in self.seen)


@contextmanager
def kept_for_backward(but: set[int]) -> Iterator[Callable[[], int]]:
    """Bytes of the distinct storages that the graph keeps alive, measured when asked, after forward."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def count() -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        return sum(size for pointer, size in storages.items() if pointer not in but)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count


@dataclass
class Site:
    """A linear, its whole weight and the whole factors."""

    linear: Any
    weight: Tensor
    a: Tensor
    b: Tensor


def build(kind: str, tp: int, sequence: bool, mode: str | None, rank: int = RANK) -> tuple[Site, Any]:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from lightning_mcore_lora import LoRAConfig, apply_lora, cpu_backend
    from lightning_mcore_lora.adapters import adapters
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    cpu_backend.apply()
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
    options = {"config": config, "init_method": nn.init.normal_, "bias": False, "skip_bias_add": True}
    cls, more = (ColumnParallelLinear, {}) if kind == "column" else (RowParallelLinear, {"input_is_parallel": True})
    linear = cls(D_IN, D_OUT, **options, **more)
    generator = torch.Generator().manual_seed(1)
    weight, a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((D_OUT, D_IN), (rank, D_IN), (D_OUT, rank))
    )
    with torch.no_grad():
        linear.weight.copy_(outputs(weight, parallel, 0) if kind == "column" else features(weight, parallel, 1))
    holder = nn.Module()
    setattr(holder, BASE_NAMES[kind], linear)
    if mode is None:
        holder.requires_grad_(False)
    else:
        lora = LoRAConfig(rank=rank, alpha=ALPHA, target_modules=(BASE_NAMES[kind],), sequence_mode=mode)
        apply_lora(holder, lora)
        holder.double()
        for _, adapter in adapters(holder):
            adapter.load_full(a, b)
    return Site(linear, weight, a, b), parallel


def features(tensor: Tensor, parallel: Any, dim: int) -> Tensor:
    """This rank's share of a dimension."""
    each = tensor.shape[dim] // parallel.sizes.tensor
    return tensor.narrow(dim, parallel.tp_rank * each, each)


def outputs(tensor: Tensor, parallel: Any, dim: int) -> Tensor:
    """This rank's share of an output that holds gate and up: of each its part."""
    half = tensor.shape[dim] // 2
    gate, up = tensor.narrow(dim, 0, half), tensor.narrow(dim, half, half)
    return torch.cat([features(gate, parallel, dim), features(up, parallel, dim)], dim)


def errors(kind: str, tp: int, sequence: bool, mode: str, rank: int = RANK) -> dict[str, float]:
    """Relative errors of output, dX, dA and dB on this rank."""
    site, parallel = build(kind, tp, sequence, mode, rank)
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(SEQUENCE, BATCH, width, generator=generator, dtype=torch.float64) for width in (D_IN, D_OUT))
    scale = ALPHA / rank
    y = x @ site.weight.T + scale * (x @ site.a.T) @ site.b.T
    dx = grad @ site.weight + scale * (grad @ site.b) @ site.a
    flat_x, flat_grad = x.flatten(0, 1), grad.flatten(0, 1)
    da = scale * (flat_grad @ site.b).T @ flat_x
    db = scale * flat_grad.T @ (flat_x @ site.a.T)

    def shard(tensor: Tensor) -> Tensor:
        return features(tensor, parallel, 0) if sequence else tensor

    local = shard(x) if kind == "column" else features(x, parallel, 2)
    local = local.clone().requires_grad_()
    out, bias = site.linear(local)
    assert bias is None
    out.backward(outputs(grad, parallel, 2) if kind == "column" else shard(grad))
    lora = site.linear.lora
    held = {"a": lora.placement.a.value, "b": lora.placement.b.value}
    if kind == "column":
        expected = {"y": outputs(y, parallel, 2), "dx": shard(dx), "db": outputs(db, parallel, 0)}
        expected["da"] = features(da, parallel, 0) if held["a"] == "sharded on rank" else da
    else:
        expected = {"y": shard(y), "dx": features(dx, parallel, 2), "db": db, "da": features(da, parallel, 1)}
    got = {"y": out.detach(), "dx": local.grad, "da": lora.a.grad, "db": lora.b.grad}
    assert site.linear.weight.grad is None
    return {name: ((got[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected}


def cost(kind: str, tp: int, sequence: bool, mode: str | None) -> dict[str, int]:
    """Bytes kept for backward and collectives of one forward and backward."""
    site, _ = build(kind, tp, sequence, mode)
    shape = [SEQUENCE, BATCH, D_IN]
    shape[0] //= tp if kind == "column" and sequence else 1
    shape[2] //= tp if kind == "row" else 1
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in site.linear.parameters()}
    with Collectives() as collectives, kept_for_backward(parameters) as kept:
        out, _ = site.linear(x * 1.0)  # a non-leaf, so that the input itself is not held by the test
        kept_bytes = kept()
        out.sum().backward()
    return {"kept": kept_bytes, "wide": collectives.wide(), "all": len(collectives.seen)}
