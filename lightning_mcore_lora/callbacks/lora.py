"""The Trainer's side of the adapters."""

from typing import Any

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_mcore_lora.adapters import LoRAConfig, LoRAReport, adapters, apply_lora
from lightning_mcore_lora.memory.estimate import PRECISIONS
from lightning_mcore_lora.strategy import MCoreTP


class LoRASPCallback(pl.Callback):
    """Freezes the model and puts LoRA adapters beside its linears, before the optimizers are made.

    Args:
        config: The adapters' settings; or give them one by one.
        regather: ``True`` is ``sequence_mode="regather"``, ``False`` is ``sequence_mode="gather"``; ``None`` leaves
            the choice to ``sequence_mode``.
        sequence_mode: See :class:`~lightning_mcore_lora.LoRAConfig`.
        verbose: Whether rank zero prints what was swapped.
        **lora: Other fields of :class:`~lightning_mcore_lora.LoRAConfig`.

    Raises:
        ValueError: If settings contradict each other or are out of range.
    """

    def __init__(
        self,
        config: LoRAConfig | None = None,
        *,
        regather: bool | None = None,
        sequence_mode: str | None = None,
        verbose: bool = True,
        **lora: Any,
    ) -> None:
        if regather is not None:
            implied = "regather" if regather else "gather"
            if sequence_mode not in (None, implied):
                raise ValueError(
                    f"regather={regather} means sequence_mode={implied!r}, not {sequence_mode!r}: give one"
                )
            sequence_mode = implied
        if sequence_mode is not None:
            lora["sequence_mode"] = sequence_mode
        if config is not None and lora:
            raise ValueError(f"config and {sorted(lora)} are both given: put all settings into LoRAConfig")
        try:
            self.config = config or LoRAConfig(**lora)
        except TypeError as error:
            raise ValueError(
                f"unknown setting among {sorted(lora)}; known: {sorted(LoRAConfig.__dataclass_fields__)}"
            ) from error
        self.verbose = verbose
        self.report: LoRAReport | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if not isinstance(trainer.strategy, MCoreTP):
            raise ValueError(
                f"{type(self).__name__} needs Trainer(strategy=MCoreTP(...)), not {type(trainer.strategy).__name__}"
            )
        trainer.strategy.register_transform(self._apply)

    def on_after_setup(self, **kwargs: Any) -> None:
        """Called by Fabric.

        Raises:
            TypeError: Always: by now the optimizer holds the whole model.
        """
        raise TypeError(
            f"{type(self).__name__} is for the Trainer: with Fabric call apply_lora(model, LoRAConfig(...)) before "
            "fabric.setup"
        )

    def _apply(self, module: nn.Module) -> None:
        if next(adapters(module), None):  # a second fit, or validate after fit
            return
        precision = PRECISIONS.get(str(module.trainer.precision)) if isinstance(module, pl.LightningModule) else None
        self.report = apply_lora(module, self.config, precision and precision.activations)
        if self.verbose and isinstance(module, pl.LightningModule) and module.trainer.is_global_zero:
            self.report.print()
