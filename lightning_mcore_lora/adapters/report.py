"""What was swapped, how, at what cost, and why not otherwise."""

import io
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_mcore_lora.adapters.cost import Cost

TRAINED = "in full"


@dataclass(frozen=True)
class SiteReport:
    """One linear, or one module that is trained in full.

    Args:
        site: Path of the module.
        kind: Kind in the placement table.
        placement: Layout of the factors; ``None`` if it got no adapter.
        mode: Sequence mode that runs, or ``"in full"``; ``None`` if it is not trained.
        reason: Why it got no adapter, or does not run as asked.
        rank: Rank of the factors.
        parameters: Trainable parameters over all ranks, each logical one counted once.
        cost: Bytes kept and sent on one rank.
    """

    site: str
    kind: str | None = None
    placement: str | None = None
    mode: str | None = None
    reason: str | None = None
    rank: int | None = None
    parameters: int = 0
    cost: Cost = field(default_factory=Cost)


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
        """Parameters that train, over all ranks, each logical one counted once."""
        return sum(site.parameters for site in self.sites)

    @property
    def total_parameters(self) -> int:
        """Parameters of the model with its adapters, over all ranks."""
        return self.base_parameters + sum(site.parameters for site in self.sites if site.mode != TRAINED)

    @property
    def fallbacks(self) -> tuple[SiteReport, ...]:
        """Adapted sites that do not run as asked."""
        return tuple(site for site in self.sites if site.mode and site.reason)

    @property
    def cost(self) -> Cost:
        """What all adapters keep and send on one rank."""
        return reduce(add, (site.cost for site in self.sites), Cost())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self) | {
            "trainable_parameters": self.trainable_parameters,
            "total_parameters": self.total_parameters,
            "cost": asdict(self.cost),
        }

    @property
    def summary(self) -> str:
        """One line of counts."""
        trainable, total = self.trainable_parameters, self.total_parameters
        return f"{trainable:,} trainable of {total:,} parameters ({100 * trainable / total:.2f} %)"

    def table(self, tokens: int = 1024, microbatches: int = 1) -> Table:
        """A table in which equal layers share a row.

        Args:
            tokens: Tokens of a microbatch, sequence length times samples on one data-parallel rank.
            microbatches: Microbatches in an optimizer step.
        """
        notes: dict[str, int] = {}
        table = Table(
            title=f"LoRA: {self.summary}",
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("site", overflow="fold", min_width=16)
        for column in ("n", "mode", "rank", "parameters", "kept", "sent", "notes"):
            table.add_column(column, no_wrap=True, justify="left" if column in ("mode", "notes") else "right")

        def row(name: str, count: Any, mode: str, rank: Any, parameters: int, cost: Cost, *said: str | None) -> None:
            numbers = (str(notes.setdefault(note, len(notes) + 1)) for note in said if note)
            kept, sent = _bytes(cost.kept(tokens)), _bytes(cost.sent(tokens, microbatches))
            table.add_row(name, str(count), mode, str(rank or ""), f"{parameters:,}", kept, sent, ", ".join(numbers))

        for name, members in self._grouped():
            site, cost = members[0], reduce(add, (member.cost for member in members))
            parameters = sum(member.parameters for member in members)
            mode = site.mode or "not adapted"
            row(name, len(members), mode, site.rank, parameters, cost, site.placement, site.reason)
        table.add_section()
        row("total", "", "", None, self.trainable_parameters, self.cost)
        unit = "microbatch" if microbatches == 1 else "microbatches"
        has_experts = any("experts" in site.site.split(".") for site in self.sites)
        table.caption = "\n".join(
            (
                f"kept, sent: by one rank, in an optimizer step of {microbatches} {unit} of {tokens:,} tokens",
                *(("experts: as if each got as many tokens as any other",) if has_experts else ()),
                *(f"{number}: {note}" for note, number in notes.items()),
            )
        )
        return table

    def _grouped(self) -> Iterator[tuple[str, list[SiteReport]]]:
        groups: dict[tuple, list[SiteReport]] = {}
        for site in self.sites:
            name = re.sub(r"^.*\blayers\.\d+\.", "layers.*.", site.site)
            key = (name, site.placement, site.mode, site.reason, site.rank, site.parameters)
            groups.setdefault(key, []).append(site)
        for (name, *_), members in groups.items():
            yield name if len(members) > 1 else members[0].site, members

    def __rich__(self) -> Table:
        """See :meth:`table`."""
        return self.table()

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=120).print(self)
        return out.getvalue()

    def print(self) -> None:
        """Print the table, as wide as the terminal; into a file 120 columns wide."""
        terminal = Console()
        (terminal if terminal.is_terminal else Console(width=120)).print(self)


def _bytes(count: int) -> str:
    """In binary units, as allocators count."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.3g} GiB"
