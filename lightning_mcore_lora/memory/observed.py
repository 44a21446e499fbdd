"""What a live model is, and what it gets: enough to estimate it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.adapters.cost import predict
from lightning_mcore_lora.adapters.report import SiteReport
from lightning_mcore_lora.memory.estimate import OPTIMIZERS, PRECISIONS, MemoryEstimate, estimate_memory
from lightning_mcore_lora.parallel import ParallelSizes


def language_model(module: nn.Module) -> Any | None:
    """The first of Megatron-Core's transformers in a module, by what it holds: a vocabulary, layers of attention."""
    names = ("config", "decoder", "vocab_size")
    found: Any = next((m for m in module.modules() if all(hasattr(m, name) for name in names)), None)
    layers = getattr(getattr(found, "decoder", None), "layers", ())
    return found if layers and all(hasattr(layer, "self_attention") for layer in layers) else None


def adapted_sites(module: nn.Module, sizes: ParallelSizes, precision: str) -> Iterator[SiteReport]:
    """Each adapter with its mode, why it does not run as asked, and its cost."""
    element = PRECISIONS[precision].activations.itemsize if precision in PRECISIONS else None
    for _, adapter in adapters(module):
        site, plan = adapter.site, adapter.plan
        cost = predict(site, plan, adapter.config, sizes, element)
        yield SiteReport(site.name, site.kind, mode=plan.placement.mode, reason=plan.fallback, cost=cost)


class Observed:
    """Notes the largest batch that a model gets.

    Args:
        module: Holds the model.
        sizes: The layout.
        precision: Lightning's setting.
        accelerator: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, module: nn.Module, sizes: ParallelSizes, precision: str, accelerator: str) -> None:
        self._model = language_model(module)
        self._sizes, self._precision, self._accelerator = sizes, precision, accelerator
        self._optimizer = "adamw"
        self._batch = (0, 0)
        self._handle = None
        if self._model is not None:
            self._handle = self._model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not model.training:  # validation keeps nothing
            return
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.numel() > self._batch[0] * self._batch[1]:
            self._batch = (tokens.shape[0], tokens.shape[1])

    def set_optimizer(self, optimizer: Any) -> None:
        """Take note of a torch optimizer; one that the estimate does not know counts as AdamW."""
        name = type(optimizer).__name__.lower()
        if name == "sgd" and any(group.get("momentum") for group in optimizer.param_groups):
            name = "sgd with momentum"
        self._optimizer = name if name in OPTIMIZERS else "adamw"

    def estimate(self) -> MemoryEstimate:
        """The estimate of what runs, for the largest batch until now.

        Raises:
            ValueError: If there is nothing to estimate, saying why; or what ``estimate_memory`` raises.
        """
        found = self._model
        if found is None:
            raise ValueError("the module holds none of Megatron-Core's language models")
        adapter = next((adapter for _, adapter in adapters(found)), None)
        if adapter is None:
            raise ValueError("the model has no adapters")
        batch, sequence = self._batch
        if not batch:
            raise ValueError("the model has not run yet")
        kinds = {type(module).__name__ for module in found.modules()}
        return estimate_memory(
            found.config,
            self._sizes,
            sequence_length=sequence,
            micro_batch_size=batch,
            precision=self._precision,
            optimizer=self._optimizer,
            lora=adapter.config,
            accelerator=self._accelerator,
            layers="te" if any(kind.startswith("TE") for kind in kinds) else "local",
            vocab_size=found.vocab_size,
            tied=getattr(found, "share_embeddings_and_output_weights", False),
        )

    def close(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
