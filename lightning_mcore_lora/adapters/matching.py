"""Names of modules: patterns, and what a user may have meant."""

import difflib
import re
from collections.abc import Iterable
from functools import cache


def check_pattern(setting: str, pattern: str) -> None:
    """Check a pattern.

    Raises:
        ValueError: If a component is neither a name nor ``*``.
    """
    for component in pattern.split("."):
        if not component or ("*" in component and component != "*"):
            raise ValueError(
                f"{setting}: {pattern!r} has the component {component!r}; write whole names joined by dots, with '*' "
                "for one or more of them, as in '*.layers.1.*.linear_fc1'"
            )


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = (r"[^.]+(?:\.[^.]+)*" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"(?:.*\.)?" + r"\.".join(parts))


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern describes the end of a path."""
    return _expression(pattern).fullmatch(path) is not None


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """The first pattern that describes a path."""
    return next((pattern for pattern in patterns if matches(pattern, path)), None)


def layer_of(path: str) -> int | None:
    """Number of the layer in which a path lies."""
    found = re.search(r"(?:^|(?<!mtp)\.)layers\.(\d+)(?:\.|$)", path)  # those of multi-token prediction count apart
    return int(found[1]) if found else None


def near_names(pattern: str, paths: Iterable[str]) -> list[str]:
    """Names that a pattern may have meant: of whole paths if it has several components, of their ends if it has one."""
    paths = list(dict.fromkeys(paths))
    ends = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    return difflib.get_close_matches(pattern, paths if "." in pattern else ends, n=3, cutoff=0.5) or ends
