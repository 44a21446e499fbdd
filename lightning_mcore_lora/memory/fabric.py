"""Memory in Fabric's log."""

from pathlib import Path
from types import TracebackType
from typing import Any

from lightning.fabric import Fabric
from torch import nn

from lightning_mcore_lora.memory.estimate import MemoryEstimate
from lightning_mcore_lora.memory.monitor import Monitor
from lightning_mcore_lora.parallel import ParallelSizes


class FabricMemoryMonitor:
    """Logs memory, finds conflicts and explains an out-of-memory as :class:`~lightning_mcore_lora.MemoryMonitor` does.

    Around the loop, so that what fails in it is explained::

        with FabricMemoryMonitor(fabric, model, every=10) as monitor:
            for step, batch in enumerate(loader, 1):
                ...
                monitor.step(step)

    Args:
        fabric: Launched; its loggers get the values.
        model: As ``fabric.setup`` returned it.
        every: Optimizer steps from one log to the next.
        optimizer: The optimizer, for the estimate.
        csv: See :class:`~lightning_mcore_lora.MemoryMonitor`.
        plot: See there.
        snapshots: See there.
        estimate: See there.

    Raises:
        TypeError: If ``estimate`` is none.
        ValueError: If ``every`` is not a positive integer, ``csv`` is a folder, or the plot's suffix is unknown.
        ConflictError: On all ranks, if settings do not fit each other.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module | None = None,
        every: int = 50,
        optimizer: Any = None,
        csv: str | Path | None = None,
        plot: str | Path | None = None,
        snapshots: str | Path | None = None,
        estimate: MemoryEstimate | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a positive integer")
        self._fabric, self._every = fabric, every
        self._optimizers = [] if optimizer is None else [optimizer]
        self._monitor = Monitor(csv, plot, snapshots, estimate)
        strategy: Any = fabric.strategy
        parallel = getattr(strategy, "parallel", None)
        sizes = ParallelSizes(fabric.world_size) if parallel is None else parallel.sizes
        try:
            self._monitor.start(model, sizes, fabric.device, str(strategy.precision.precision))
        except BaseException:  # nobody will close it
            self.close()
            raise

    def __enter__(self) -> "FabricMemoryMonitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._monitor.explain(error, self._fabric.device, self._optimizers)
        self.close()

    def step(self, step: int) -> dict[str, float]:
        """Tell it that an optimizer step is done; all ranks do.

        Args:
            step: Optimizer steps that are done.

        Returns:
            The values that were logged; none at most steps.
        """
        if step % self._every:
            return {}
        values = self._monitor.read(step)
        if values:  # none after close
            self._fabric.log_dict(values, step)
        return values

    def close(self) -> None:
        """Draw the plot, and stop to watch."""
        self._monitor.close(self._optimizers)
