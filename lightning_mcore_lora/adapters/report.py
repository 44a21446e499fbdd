"""What was swapped, how, and why not otherwise."""

import io
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class SiteReport:
    """One linear.

    Args:
        site: Path of the module.
        placement: Layout of the factors; ``None`` if it got no adapter.
        mode: Sequence mode that runs; ``None`` if it got no adapter.
        reason: Why it got no adapter, or not the mode asked for.
        parameters: Trainable parameters over all ranks.
    """

    site: str
    placement: str | None = None
    mode: str | None = None
    reason: str | None = None
    parameters: int = 0


@dataclass(frozen=True)
class LoRAReport:
    """Every linear that was a target, and what became of it.

    Args:
        sites: One entry a site, in the model's order.
        base_parameters: Parameters of the model without adapters, over all ranks.
    """

    sites: tuple[SiteReport, ...]
    base_parameters: int

    @property
    def trainable_parameters(self) -> int:
        """Parameters of all adapters, over all ranks, each logical one counted once."""
        return sum(site.parameters for site in self.sites)

    @property
    def fallbacks(self) -> tuple[SiteReport, ...]:
        """Adapted sites that do not run the mode asked for."""
        return tuple(site for site in self.sites if site.mode and site.reason)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self) | {"trainable_parameters": self.trainable_parameters}

    def __rich__(self) -> Table:
        """A table in which equal layers share a row."""
        table = Table(title=f"LoRA: {self.summary}", title_justify="left")
        for column in ("site", "layers", "mode"):
            table.add_column(column, no_wrap=True)
        for column in ("placement", "why"):
            table.add_column(column, overflow="fold")
        for name, count, site in self._grouped():
            table.add_row(name, str(count), site.mode or "not adapted", site.placement or "-", site.reason or "")
        return table

    @property
    def summary(self) -> str:
        """One line of counts."""
        total = self.base_parameters + self.trainable_parameters
        return (
            f"{self.trainable_parameters:,} trainable of {total:,} parameters "
            f"({100 * self.trainable_parameters / total:.2f} %)"
        )

    def _grouped(self) -> Iterator[tuple[str, int, SiteReport]]:
        groups: dict[tuple, list[SiteReport]] = {}
        for site in self.sites:
            name = re.sub(r"^.*\blayers\.\d+\.", "layers.*.", site.site)
            groups.setdefault((name, site.placement, site.mode, site.reason), []).append(site)
        for (name, *_), members in groups.items():
            yield (name if len(members) > 1 else members[0].site), len(members), members[0]

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=120).print(self)
        return out.getvalue()

    def print(self) -> None:
        """Print the table, as wide as the terminal; into a file 120 columns wide."""
        terminal = Console()
        (terminal if terminal.is_terminal else Console(width=120)).print(self)
