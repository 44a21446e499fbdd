"""The face that the Trainer sees."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_mcore_lora.checkpoint.errors import CheckpointError
from lightning_mcore_lora.strategy import launchers
from lightning_mcore_lora.strategy.engine import REFUSED_OPTIMIZERS
from lightning_mcore_lora.strategy.loaders import ResumableLoader
from lightning_mcore_lora.strategy.precision import (
    agree_on_overflow,
    check_precision,
    check_scalable,
    convert,
    loss_scale,
)
from lightning_mcore_lora.strategy.processes import Processes
from lightning_mcore_lora.strategy.progress import go_on, reopen_epoch

_COPIES = "it copies the whole model, frozen base and process groups included; average adapter checkpoints instead"
#: Callbacks of Lightning's that do not fit, and why.
REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": _COPIES,
    "WeightAveraging": _COPIES,
    "EMAWeightAveraging": _COPIES,
    "OnExceptionCheckpoint": "an exception comes to one rank, and a checkpoint is written by all together",
    "ModelPruning": "it replaces parameters by masked copies, whose gradients are not reduced",
}

#: Settings of the Trainer in which processes must not differ: each decides which collective comes next.
SAME_SETTINGS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "overfit_batches",
    "precision",
    "val_check_interval",
)


class TrainerFace(Processes, ParallelStrategy):
    """Speaks the Trainer's words to the engine."""

    _num_tokens: Tensor | int | None = None  # of the microbatch whose backward comes next
    _loader_states: Sequence[dict[str, Any]] = ()  # of the checkpoint that the run goes on from

    # -- set-up -------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        self._launch_with(launchers.TRAINER)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.engine.transform(module)
        if str(self.precision_plugin.precision) == "bf16-true":
            convert(module, torch.bfloat16)
        self.model_to_device()
        agree_on_overflow(self.precision_plugin)
        if fitting:
            self.engine.prepare(module, {name: getattr(trainer, name) for name in SAME_SETTINGS})
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]

    @override
    def setup_environment(self) -> None:
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            self._refuse(module._trainer)
        Processes.setup_environment(self)

    def _refuse(self, trainer: "pl.Trainer") -> None:
        check_precision(self.precision_plugin.precision)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for kind in type(callback).__mro__:
                if kind.__name__ in REFUSED_CALLBACKS:
                    raise NotImplementedError(
                        f"{type(callback).__name__} is not supported by {type(self).__name__}: "
                        f"{REFUSED_CALLBACKS[kind.__name__]}"
                    )
            if getattr(callback, "save_last", None) == "link" and self.engine.async_save:
                raise NotImplementedError(
                    f"{type(callback).__name__}(save_last='link') does not fit async_save=True: Lightning would delete "
                    "the last checkpoint for a link to one that is still being written. Use save_last=True"
                )
            if getattr(callback, "save_on_exception", False):
                raise NotImplementedError(
                    f"{type(callback).__name__}(save_on_exception=True) is not supported by {type(self).__name__}: "
                    f"{REFUSED_CALLBACKS['OnExceptionCheckpoint']}; use every_n_train_steps"
                )

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        try:
            super().setup_optimizers(trainer)
        except MisconfigurationException as error:  # Lightning knows torch's optimizers only
            reason = REFUSED_OPTIMIZERS[MegatronOptimizer]
            error.add_note(f"Megatron-Core's optimizers are not supported by MCoreTP: {reason}")
            raise
        if len(self.optimizers) > 1:
            raise NotImplementedError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers; {type(self).__name__} reduces all "
                "gradients at one step: return one optimizer with parameter groups"
            )
        for optimizer in self.optimizers:
            check_scalable(self.precision_plugin, optimizer)
            self.engine.adopt(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.engine.report(exception)

    @override
    def teardown(self) -> None:
        self.engine.stop()
        super().teardown()

    # -- data ---------------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, DataLoader):
            return dataloader
        self.engine.share_out(dataloader)  # before the Trainer seeds workers by the global rank
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return self.engine.for_evaluation(dataloader, self.root_device)
        if hasattr(dataloader, "state_dict"):
            return dataloader
        consumed = lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready  # noqa: E731
        return ResumableLoader(dataloader, self.root_device, consumed, self.parallel.sizes.data)

    def _training_loaders(self) -> list[ResumableLoader]:
        assert self.lightning_module is not None
        combined = self.lightning_module.trainer.fit_loop._combined_loader
        return [] if combined is None else [dl for dl in combined.flattened if isinstance(dl, ResumableLoader)]

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self._num_tokens = output.get("num_tokens") if isinstance(output, Mapping) else None
        assert self.lightning_module is not None
        if self._num_tokens is not None and not self.lightning_module.automatic_optimization:
            raise ValueError(
                "training_step returned num_tokens under manual optimization, after its backward: give it there, "
                "self.manual_backward(summed, num_tokens=n)"
            )
        return output

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        num_tokens: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        module, plugin, reducer = self.lightning_module, self.precision_plugin, self.engine.reducer
        assert module is not None
        assert reducer is not None
        automatic = module.automatic_optimization
        accumulate = module.trainer.accumulate_grad_batches if automatic else 1
        tokens = self._num_tokens if num_tokens is None else num_tokens
        loss = reducer.before_backward(closure_loss, tokens, accumulate, loss_scale(plugin))
        loss = plugin.pre_backward(loss, module)
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        if automatic and not reducer.is_accumulating:
            reducer.finalize()  # hooks see the reduced gradients from on_after_backward on
        else:
            reducer.after_backward()
        return plugin.post_backward(loss, module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self.engine.stepping(optimizer):
            closure = self.engine.reduced_after(closure)
            return ParallelStrategy.optimizer_step(self, optimizer, closure, model, **kwargs)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.engine.clip_grad_norm(self._reduced_parameters(optimizer), float(clip_val))

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        torch.nn.utils.clip_grad_value_(self._reduced_parameters(optimizer), clip_val)

    def _reduced_parameters(self, optimizer: Optimizer) -> Any:
        assert self.engine.reducer is not None
        self.engine.reducer.finalize()  # under manual optimization nothing has yet
        return self.precision_plugin.main_params(optimizer)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # adapters must be there before their weights

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        tensors = self.engine.tensors(self.lightning_module)
        return {name: value.detach() for name, value in {**tensors.buffers, **tensors.trained}.items()}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} saves directories and takes no storage_options")
        assert self.lightning_module is not None
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        optimizers = self._plain_optimizers() if "optimizer_states" in checkpoint else []
        tensors = self.engine.tensors(self.lightning_module)
        left_out = (tensors.trained.keys() | tensors.buffers.keys()) - checkpoint["state_dict"].keys()  # by a hook
        step, loaders = checkpoint["global_step"], self._training_loaders()
        self.engine.save(str(filepath), rest, tensors, optimizers, loaders, step, left_out)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        resumes = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._plain_optimizers() if resumes else []  # an earlier fit may have left some
        tensors = self.engine.tensors(module)
        loaded = self.engine.load(str(checkpoint_path), tensors, optimizers, module.strict_loading)
        if "loops" not in loaded.rest:
            raise CheckpointError(
                f"{checkpoint_path} was not written by a Trainer: its weights can be read by load_checkpoint(model, "
                "path), its optimizer by the loop that saved it"
            )
        fit_loop = loaded.rest["loops"]["fit_loop"]
        reopen_epoch(fit_loop)
        self._loader_states = fit_loop["state_dict"].get("combined_loader", [])
        checkpoint = loaded.rest | {"state_dict": loaded.weights}
        if loaded.optimizer_states:  # without, the Trainer says that only weights were saved
            checkpoint["optimizer_states"] = loaded.optimizer_states
        return checkpoint

    def _plain_optimizers(self) -> list[Optimizer]:
        return [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # The checkpoint's names were compared with the module's; frozen weights may be absent by design.
        assert self.lightning_module is not None
        self.engine.load_weights(self.lightning_module, checkpoint["state_dict"])

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self.engine.remove(str(filepath))

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        trainer, loaders = self.lightning_module.trainer, self._training_loaders()
        if self.engine.continue_streams(loaders):
            automatic = self.lightning_module.automatic_optimization
            accumulate = trainer.accumulate_grad_batches if automatic else 1
            go_on(trainer.fit_loop, loaders, self._loader_states, accumulate)
