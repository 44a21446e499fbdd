"""Memory in Fabric's log."""

from lightning.fabric import Fabric

from lightning_mcore_lora.memory.readings import MemoryWindow, worst_over_ranks


class FabricMemoryMonitor:
    """Logs memory as :class:`~lightning_mcore_lora.MemoryMonitor` does, under Fabric.

    Args:
        fabric: Launched; its loggers get the values.
        every: Optimizer steps from one log to the next.

    Raises:
        ValueError: If ``every`` is not a positive integer.
    """

    def __init__(self, fabric: Fabric, every: int = 50) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a positive integer")
        self._fabric, self._every = fabric, every
        self._window = MemoryWindow(fabric.device)

    def step(self, step: int) -> dict[str, float]:
        """Tell it that an optimizer step is done; all ranks do.

        Args:
            step: Optimizer steps that are done.

        Returns:
            The values that were logged; none at most steps.
        """
        if step % self._every:
            return {}
        values = worst_over_ranks(self._window.close(), self._window.peak, self._fabric.device)
        self._fabric.log_dict(values, step)
        return values
