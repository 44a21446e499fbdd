"""What workers of the contract test run: Megatron-Core's GPT of Transformer Engine layers, with adapters.

Imports of Megatron-Core are inside functions: the stand-in must be there first.
"""

import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.te_contract import standin

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
MODES = ("gather", "regather", "local")
EXPERTS = 4


def on_ranks(world: int, function: Callable, *args: Any) -> list[Any]:
    """Run a function on fresh processes, and return what each gave, by rank."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{rank}.pt")) for rank in range(world)]
        processes = [
            context.Process(target=_serve, args=(rank, world, folder, path, function, args))
            for rank, path in enumerate(paths)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        results = [torch.load(path, weights_only=False) if Path(path).exists() else "died" for path in paths]
    for result in results:
        assert not isinstance(result, str), result
    return results


def _serve(rank: int, world: int, folder: str, path: str, function: Callable, args: tuple) -> None:
    import traceback

    torch.set_num_threads(1)
    standin.install()
    from lightning_mcore_lora import cpu_backend
    from lightning_mcore_lora.parallel import ParallelContext, ParallelSizes
    from lightning_mcore_lora.strategy import seeding

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        parallel = ParallelContext.create(ParallelSizes(world, world, world > 1, 1, world))
        cpu_backend.apply()
        seeding.seed_for_init()
        torch.save(function(parallel, *args), path)
    except BaseException:
        torch.save(f"rank {rank}: {traceback.format_exc()}", path)


def fill(model: Any, parallel: Any) -> None:
    """Weights cut from whole ones that do not depend on the layout."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        sharded = getattr(p, "tensor_model_parallel", False)
        shape = list(p.shape)
        dim = p.partition_dim if sharded else 0
        shape[dim] *= parallel.sizes.tensor if sharded else 1
        whole = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
        parts = whole.chunk(2) if "linear_fc1." in name and "norm" not in name else (whole,)
        shards = [part.chunk(parallel.sizes.tensor, dim)[parallel.tp_rank] if sharded else part for part in parts]
        p.data.copy_(torch.cat(shards, dim))


def factors(site: Any) -> tuple[Tensor, Tensor]:
    """Whole random factors of a site."""
    generator = torch.Generator().manual_seed(sum(site.name.encode()))
    a = torch.randn(RANK, site.d_in, generator=generator) * site.d_in**-0.5
    return a, torch.randn(site.d_out, RANK, generator=generator) * 0.3


def loss_of(model: Any) -> Tensor:
    """Mean loss of fixed tokens."""
    tokens = torch.randint(0, standin.VOCAB, (2, standin.SEQUENCE + 1), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(standin.SEQUENCE).expand(2, -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()


def dense(parallel: Any, mode: str, bias: bool) -> dict[str, Any]:
    """A dense model with adapters: what stands in it, and one step."""
    from lightning_mcore_lora import LoRAConfig, apply_lora, remove_lora
    from lightning_mcore_lora.adapters import adapters

    model = standin.build(add_bias_linear=bias)
    fill(model, parallel)
    linears = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] in TARGETS}
    keys = set(model.state_dict())
    returns = {name: _structure(linear, parallel) for name, linear in linears.items()}
    report = apply_lora(model, LoRAConfig(rank=RANK, alpha=ALPHA, sequence_mode=mode))
    for _, adapter in adapters(model):
        adapter.load_full(*factors(adapter.site))
    flags = {n: m.return_layernorm_output for n, m in linears.items() if hasattr(m, "return_layernorm_output")}
    gathered = [getattr(m, "return_layernorm_output_gathered", False) for m in linears.values()]
    added = set(model.state_dict()) - keys
    with_adapters = {name: _structure(linear, parallel) for name, linear in linears.items()}
    with standin.cpu_kernels():
        loss = loss_of(model)
        loss.backward()
    shapes = {a.site.name: (tuple(a.a.shape), tuple(a.b.shape)) for _, a in adapters(model)}
    gradients = {
        (a.site.name, n): (getattr(p, "tensor_model_parallel", False), p.partition_dim, p.partition_stride, p.grad)
        for _, a in adapters(model)
        for n, p in a.named_parameters()
    }
    remove_lora(model)
    after = [m.return_layernorm_output for m in linears.values() if hasattr(m, "return_layernorm_output")]
    return {
        "classes": {name: type(linear).__name__ for name, linear in linears.items()},
        "sites": {site.site: (site.kind, site.placement, site.mode, site.reason) for site in report.sites},
        "shapes": shapes,
        "added": added,
        "missing": keys - set(model.state_dict()),
        "flags": flags,
        "gathered": gathered,
        "flags after removal": after,
        "returns": returns,
        "returns with adapters": with_adapters,
        "loss": loss.item(),
        "gradients": gradients,
    }


def _structure(linear: Any, parallel: Any) -> Any:
    """Shapes of what a linear returns."""
    row = linear.parallel_mode == "row"
    sequence = standin.SEQUENCE // (1 if row else parallel.sizes.tensor)
    with standin.cpu_kernels(), torch.no_grad():
        result = linear(torch.randn(sequence, 2, linear.in_features))
    return tuple(None if item is None else tuple(item.shape) for item in result)


def folded(parallel: Any, bias: bool) -> dict[str, Any]:
    """The oracle: one process, the same model with weights W + s B A; factors' gradients from the weights'."""
    from lightning_mcore_lora.adapters.sites import find_sites

    model = standin.build(add_bias_linear=bias)
    fill(model, parallel)
    sites = [site for site in find_sites(model) if site.leaf in TARGETS]
    for site in sites:
        a, b = factors(site)
        site.linear.weight.data.add_(SCALE * b @ a)
    with standin.cpu_kernels():
        loss = loss_of(model)
        loss.backward()
    gradients = {}
    for site in sites:
        a, b = factors(site)
        gradients[site.name, "a"] = SCALE * b.T @ site.linear.weight.grad
        gradients[site.name, "b"] = SCALE * site.linear.weight.grad @ a.T
    return {"loss": loss.item(), "gradients": gradients}


def kept(parallel: Any) -> dict[str, tuple[int, int]]:
    """Bytes that forward keeps beside the frozen base, counted and predicted, by mode."""
    from benchmarks.counting import kept_for_backward
    from lightning_mcore_lora import LoRAConfig, apply_lora, remove_lora

    model = standin.build().requires_grad_(False)
    model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())

    def count() -> int:
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        with standin.cpu_kernels(), kept_for_backward(own) as kept_bytes:
            loss = loss_of(model)
            assert loss.requires_grad
            return kept_bytes()

    count()  # caches are filled
    floor, found = count(), {}
    for name, settings in {**{mode: {"sequence_mode": mode} for mode in MODES}, "A frozen": {"freeze_a": True}}.items():
        report = apply_lora(model, LoRAConfig(rank=RANK, **settings))
        found[name] = count() - floor, report.cost.kept(2 * standin.SEQUENCE)
        remove_lora(model)
    return found


def cast(parallel: Any) -> tuple[int, int]:
    """Bytes of cast weights that frozen linears keep under autocast, counted and estimated."""
    from lightning_mcore_lora import LoRAConfig, estimate_memory
    from lightning_mcore_lora.parallel import ParallelSizes

    model = standin.build().requires_grad_(False)
    linears = [module for name, module in model.named_modules() if name.endswith(TARGETS)]
    saved: list[Tensor] = []
    with standin.cpu_kernels(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        for linear in linears:
            hidden = torch.randn(8, 1, linear.in_features, requires_grad=True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            torch.set_autocast_enabled("cuda", True)  # torch.autocast would not, without CUDA
            linear(hidden)
            torch.set_autocast_enabled("cuda", False)
    shapes = {linear.weight.shape for linear in linears}
    estimate = estimate_memory(
        model.config,
        ParallelSizes(1),
        sequence_length=8,
        precision="bf16-mixed",
        lora=LoRAConfig(target_modules=TARGETS),
        vocab_size=standin.VOCAB,
    )
    counted = sum(t.numel() * 2 for t in saved if t.dtype == torch.bfloat16 and t.shape in shapes)
    return counted, estimate.components["weights cast to half precision"]


def mixture(parallel: Any, lora: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A mixture of grouped experts and shared ones with adapters: what stands in it, and one step."""
    from lightning_mcore_lora import LoRAConfig, apply_lora
    from lightning_mcore_lora.adapters import adapters, merged_weights

    model = standin.build(EXPERTS, moe_shared_expert_intermediate_size=48, **config)
    fill(model, parallel)
    keys = set(model.state_dict())
    settings = LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=(*TARGETS, "router"), **lora)
    report = apply_lora(model, settings)
    for _, adapter in adapters(model):
        a, b = expert_factors(adapter.site)
        adapter.load_full(*(values if name in adapter.plan.each else values[0] for name, values in zip("ab", (a, b))))
    with standin.cpu_kernels():
        loss = loss_of(model)
        loss.backward()
    gradients = {
        (a.site.name, n): (getattr(p, "tensor_model_parallel", False), p.partition_dim, p.partition_stride, p.grad)
        for _, a in adapters(model)
        for n, p in a.named_parameters()
    }
    return {
        "classes": {a.site.name: type(a.site.linear).__name__ for _, a in adapters(model)},
        "sites": {site.site: (site.placement, site.reason) for site in report.sites},
        "missing": keys - set(model.state_dict()),
        "added": set(model.state_dict()) - keys,
        "loss": loss.item(),
        "gradients": gradients,
        "merged": {a.site.name: torch.stack(merged_weights(a)).shape for _, a in adapters(model) if a.site.experts},
    }


def expert_factors(site: Any) -> tuple[Tensor, Tensor]:
    """Whole random factors of a site, of as many experts as it has, or of one linear."""
    generator = torch.Generator().manual_seed(sum(site.name.encode()))
    count = max(site.experts, 1)
    a = torch.randn(count, RANK, site.d_in, generator=generator) * site.d_in**-0.5
    return a, torch.randn(count, site.d_out, RANK, generator=generator) * 0.3


def folded_mixture(parallel: Any, shared: str, config: dict[str, Any]) -> dict[str, Any]:
    """The oracle: one process, weights W + s B A of each expert; ``shared`` names the factors that all have."""
    from lightning_mcore_lora.adapters.sites import find_sites

    model = standin.build(EXPERTS, moe_shared_expert_intermediate_size=48, **config)
    fill(model, parallel)
    sites = [site for site in find_sites(model) if site.leaf in (*TARGETS, "router")]
    held = {}
    for site in sites:
        a, b = expert_factors(site)
        if site.experts:
            a, b = (v[:1].expand_as(v) if n in shared else v for n, v in zip("ab", (a, b)))
        held[site.name] = a, b
        for weight, delta in zip(site.weights(), SCALE * b @ a, strict=True):
            weight.data.add_(delta)
            weight.requires_grad_(not site.experts)  # the stand-in knows no gradients of grouped weights
    inputs: dict[str, Any] = {}
    handles = [site.linear.register_forward_hook(_record(site.name, inputs)) for site in sites if site.experts]
    with standin.cpu_kernels():
        loss = loss_of(model)
        loss.backward()
    for handle in handles:
        handle.remove()
    gradients = {}
    for site in sites:
        a, b = held[site.name]
        if site.experts:
            x, sizes, output = inputs[site.name]
            pairs = zip(x.split(sizes), output.grad.split(sizes), strict=True)
            weights = torch.stack([grad.T @ tokens for tokens, grad in pairs])
        else:
            weights = torch.stack([weight.grad for weight in site.weights()])
        for name, gradient in (("a", SCALE * b.mT @ weights), ("b", SCALE * weights @ a.mT)):
            one = not site.experts or name in shared
            gradients[site.name, name] = gradient.sum(0) if one else gradient
    return {"loss": loss.item(), "gradients": gradients}


def _record(name: str, inputs: dict[str, Any]) -> Callable:
    def hook(module: Any, args: tuple, result: tuple) -> None:
        result[0].retain_grad()
        inputs[name] = args[0].detach(), list(args[1]), result[0]

    return hook


def user_buffers(parallel: Any) -> dict[str, list[tuple[str | None, str | None]]]:
    """Mode and reason of two sites, of which the first overlaps in user buffers, by the mode asked for."""
    from lightning_mcore_lora import LoRAConfig, apply_lora, remove_lora

    model = standin.build()
    model.decoder.layers[0].self_attention.linear_qkv.ub_overlap_ag_fprop = True
    found = {}
    for mode in ("regather", "local"):
        report = apply_lora(model, LoRAConfig(rank=RANK, target_modules=("linear_qkv",), sequence_mode=mode))
        found[mode] = [(site.mode, site.reason) for site in report.sites]
        remove_lora(model)
    return found


def duplicated(parallel: Any) -> dict[str, Any]:
    """A linear that is duplicated over TP on sequence-local tokens, against plain algebra."""
    from megatron.core.extensions.transformer_engine import TELinear
    from megatron.core.transformer.module import MegatronModule

    from lightning_mcore_lora import LoRAConfig, apply_lora

    config = standin.build().config
    with standin.active():
        linear = TELinear(
            standin.HIDDEN,
            6,
            parallel_mode="duplicated",
            config=config,
            init_method=torch.nn.init.normal_,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(s, generator=generator) for s in ((6, standin.HIDDEN), (8, 2, standin.HIDDEN)))
    linear.weight.data.copy_(weight)
    holder = MegatronModule(config)
    holder.down = linear
    report = apply_lora(holder, LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=("down",)))
    a, b = factors(linear.lora.site)
    linear.lora.load_full(a, b)
    with standin.cpu_kernels():
        out, _ = linear(x.chunk(parallel.sizes.tensor)[parallel.tp_rank])
        out.square().sum().backward()
    a, b = a.requires_grad_(), b.requires_grad_()
    y = x @ (weight + SCALE * b @ a).T
    y.square().sum().backward()
    pairs = {"a": (linear.lora.a.grad, a.grad), "b": (linear.lora.b.grad, b.grad)}
    pairs["y"] = (out.detach(), y.detach().chunk(parallel.sizes.tensor)[parallel.tp_rank])
    errors = {name: ((one - other).abs().max() / other.abs().max()).item() for name, (one, other) in pairs.items()}
    return {"kind": report.sites[0].kind, "errors": errors}
