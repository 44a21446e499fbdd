"""The Trainer's counters, where a run resumes in the middle of an epoch."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loops.loop import _Loop

from lightning_mcore_lora.strategy.loaders import ResumableLoader


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Have an epoch that ``max_steps`` or a stop has cut short go on, in the saved state of a fit loop.

    The Trainer counts it as processed when it leaves it, and would begin the next.
    """
    epoch, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if batches["is_last_batch"] or not batches["current"]["ready"]:
        return
    for counters in (epoch["total"], epoch["current"]):
        for name in ("processed", "completed"):
            counters[name] = min(counters[name], counters["started"] - 1)


def go_on(fit_loop: Any, loaders: Sequence[ResumableLoader], states: Sequence[dict[str, Any]], accumulate: int) -> None:
    """Have a fit loop that is about to start go on from where its loaders were.

    The Trainer gives loaders their states before their random streams are known; and not at all, if the loaders were
    made before the checkpoint was read, as ``estimated_stepping_batches`` does.

    Args:
        fit_loop: The Trainer's.
        loaders: Those of its training loaders that are ours.
        states: What all of its training loaders had saved.
        accumulate: Microbatches of an optimizer step.
    """
    late = bool(fit_loop._combined_loader_states_to_load)
    again = late or len(loaders) == len(fit_loop._combined_loader.flattened)  # others stand no second beginning
    if again:
        fit_loop._combined_loader._load_state_dicts(states)
        fit_loop._combined_loader_states_to_load = []
    align(fit_loop, loaders, accumulate)
    if again:
        iter(fit_loop._data_fetcher)


def align(fit_loop: Any, loaders: Sequence[ResumableLoader], accumulate: int) -> None:
    """Have a fit loop that resumes count its batches from where its loaders go on.

    These know how many samples were read, which at another data-parallel or batch size are another number of batches.
    Microbatches of an optimizer step that was not taken are read again: their gradients were not saved.

    Args:
        fit_loop: The Trainer's.
        loaders: What it reads from.
        accumulate: Microbatches of an optimizer step.

    Raises:
        ValueError: If the loaders stand at different batches.
    """
    progress, epoch = fit_loop.epoch_loop.batch_progress, fit_loop.epoch_progress.current
    if progress.is_last_batch:
        for loader in loaders:
            loader.skip = 0
        if epoch.ready == epoch.completed:
            # Nothing restarts. With max_steps the Trainer would go on counting from the last batch of that epoch.
            _Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]
        return
    positions = {loader.skip for loader in loaders}
    if len(positions) > 1:
        raise ValueError(f"the training loaders would go on from different batches: {sorted(positions)}")
    if not positions:
        return
    position = positions.pop()
    position -= position % accumulate
    for loader in loaders:
        loader.skip = position
    behind = position - progress.current.ready
    for counters in (progress.total, progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counters, name, getattr(counters, name) + behind)
