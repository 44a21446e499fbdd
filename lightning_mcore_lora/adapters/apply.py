"""Put adapters into a model, and take them out."""

import logging
from collections.abc import Iterable, Iterator

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor, nn

from lightning_mcore_lora.adapters.config import LoRAConfig
from lightning_mcore_lora.adapters.cost import predict
from lightning_mcore_lora.adapters.layer import LoRAAdapter
from lightning_mcore_lora.adapters.planning import plan_lora
from lightning_mcore_lora.adapters.report import TRAINED, LoRAReport, SiteReport
from lightning_mcore_lora.adapters.sequential import SequentialAdapter
from lightning_mcore_lora.parallel import ParallelContext, shard_group

log = logging.getLogger(__name__)


def apply_lora(model: nn.Module, config: LoRAConfig, activations: torch.dtype | None = None) -> LoRAReport:
    """Freeze a model and put an adapter beside each targeted linear.

    The linears stay where they are, with their names and state-dict keys; each gains a submodule ``lora`` with the
    factors ``a`` and ``b``. Works on any module tree that holds Megatron-Core's parallel linears. Base weights are to
    be loaded before, if ``dora`` is on: the magnitudes begin as their row norms.

    Args:
        model: The model, or a module that holds it. Megatron-Core's groups must exist.
        config: The adapters' settings.
        activations: Dtype of activations, for the bytes in the report; ``None`` is that of the weights. Under mixed
            precision they differ.

    Returns:
        What became of each target.

    Raises:
        ValueError: If there is nothing to adapt, a pattern matches nothing, a rank does not fit, or the model has
            adapters already; the model is then left as it was.
        NotImplementedError: If a target's linear is fused into something larger, with what to set; in the same way.
    """
    if next(adapters(model), None):
        raise ValueError("the model has LoRA adapters already: apply_lora once, or remove_lora(model) first")
    planned = plan_lora(model, config)
    sizes = ParallelContext.current().sizes
    element = None if activations is None else activations.itemsize
    base_parameters = logical_parameters(model.parameters())
    entries: list[SiteReport] = []
    built: list[LoRAAdapter] = []
    for site, plan in planned.sites:
        if isinstance(plan, str):
            entries.append(SiteReport(site.name, site.kind, reason=plan))
            continue
        adapter = (SequentialAdapter if site.sequential else LoRAAdapter)(site, plan, config)
        built.append(adapter)
        entries.append(
            SiteReport(
                site.name,
                site.kind,
                plan.placement.name,
                plan.placement.mode,
                plan.fallback,
                plan.rank,
                logical_parameters(p for p in adapter.parameters() if p.requires_grad),
                predict(site, plan, config, sizes, element),
            )
        )
    for name, module in planned.saved:
        entries.append(SiteReport(name, mode=TRAINED, parameters=logical_parameters(module.parameters())))
    report = LoRAReport(tuple(entries), base_parameters)
    if not built:
        raise ValueError(f"none of the targeted linears can be adapted:\n{report}")
    model.requires_grad_(False)
    for adapter in built:
        adapter.attach()
    for _, module in planned.saved:
        module.requires_grad_(True)
    _let_recompute_reach_adapters(model)
    _warn_of_fallbacks(report, len(built))
    return report


def remove_lora(model: nn.Module) -> None:
    """Take every adapter out of a model. Its other parameters stay frozen, or in training, as they are.

    Args:
        model: A model after :func:`apply_lora`.
    """
    for _, adapter in list(adapters(model)):
        adapter.detach()
    for module in model.modules():
        handle = vars(module).pop("_lora_handle", None)
        if handle is not None:
            handle.remove()


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRAAdapter]]:
    """Every adapter of a model with its path."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRAAdapter))


def check_gradients(model: nn.Module) -> None:
    """Check, after a backward, that it reached every adapter; the strategy does so by itself after the first step.

    Args:
        model: A model after a forward in training and its backward.

    Raises:
        RuntimeError: If an adapter that trains got no gradient, naming its site.
    """
    raise_unreached(a.site.name for _, a in adapters(model) if a.b.requires_grad and a.b.grad is None)


def raise_unreached(names: Iterable[str]) -> None:
    """Raise if any adapter got no gradient."""
    names = list(names)
    if names:
        raise RuntimeError(
            f"{len(names)} adapter(s) got no gradient in the backward: {names[:4]}. Their linears did not run, or ran "
            "inside an activation checkpoint none of whose inputs requires a gradient. Leave them out of "
            "target_modules, or have the first hidden states require one"
        )


def logical_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """Number of parameters over all ranks, each counted once."""
    groups = ((parameter, shard_group(parameter)) for parameter in parameters)
    return sum(parameter.numel() * (1 if group is None else group.size()) for parameter, group in groups)


# -- around the model ----------------------------------------------------------------------------------------------


def _let_recompute_reach_adapters(model: nn.Module) -> None:
    """Activation checkpoints pass gradients only to inputs that ask for them, and a frozen embedding's do not."""
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding) and module.config.recompute_granularity:
            module._lora_handle = module.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _warn_of_fallbacks(report: LoRAReport, adapted: int) -> None:
    if not report.fallbacks or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
        return
    reasons = sorted({site.reason or "" for site in report.fallbacks})
    modes = sorted({site.mode or "" for site in report.fallbacks})
    log.warning(
        "LoRA: %d of %d sites do not run as asked but in mode %s: %s",
        len(report.fallbacks),
        adapted,
        ", ".join(modes),
        "; ".join(reasons),
    )
