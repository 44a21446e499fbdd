"""How processes are started."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as FabricSpawn
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricScript
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override


def check_start_method(start_method: str) -> None:
    """Check the setting.

    Raises:
        ValueError: If it is unknown.
    """
    if start_method not in TRAINER:
        raise ValueError(f"start_method={start_method!r} must be one of {tuple(TRAINER)}")


class SpawnLauncher(_MultiProcessingLauncher):
    """Starts processes for one call of the Trainer, and ends them with it.

    A model that was trained in them has gone with them: nothing that one process holds is the whole of it.
    """

    _fitted = False

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        if self._fitted and not given.get("ckpt_path"):
            raise RuntimeError(
                "start_method='spawn': the processes that trained ended with fit(), and their weights with them; this "
                "call would run on untrained ones. Give it ckpt_path='best', 'last' or a path (with a ModelCheckpoint "
                "in the Trainer), or use start_method='popen', whose processes live as long as the script"
            )
        result = super().launch(function, *args, trainer=trainer, **kwargs)
        self._fitted |= trainer is not None and trainer.state.fn == TrainerFn.FITTING
        self._already_fit = False  # Lightning would refuse a second fit even from a checkpoint
        return result

    @override
    def _collect_rank_zero_results(self, trainer: "pl.Trainer", results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, None, trainer.state, results, self.get_extra_results(trainer))

    @override
    def get_extra_results(self, trainer: "pl.Trainer") -> dict[str, Any]:
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        return super().get_extra_results(trainer) | {"folders": folders}

    @override
    def update_main_process_results(self, trainer: "pl.Trainer", extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        for callback, folder in zip(trainer.checkpoint_callbacks, extra["folders"], strict=True):
            callback.dirpath = folder  # type: ignore[attr-defined] # where ckpt_path="last" looks


TRAINER: dict[str, Callable[[Any], Any]] = {
    "popen": lambda s: _SubprocessScriptLauncher(s.cluster_environment, s.num_processes, s.num_nodes),
    "spawn": SpawnLauncher,
}
FABRIC: dict[str, Callable[[Any], Any]] = {
    "popen": lambda s: FabricScript(s.cluster_environment, s.num_processes, s.num_nodes),
    "spawn": FabricSpawn,
}
