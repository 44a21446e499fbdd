r"""The placement table: how an adapter is laid out so that it leaves its output in the base linear's parallel state.

An adapter adds :math:`s B (A x)` to a base linear, :math:`s = \alpha / r`, :math:`A` of shape ``[rank, d_in]``,
:math:`B` of shape ``[d_out, rank]``. One row of :data:`TABLE` says, for one kind of linear, state of the sequence and
mode, how each factor is sharded, which collective sits between the steps, and which factors see only a part of the
tokens, so that their gradients must be summed. Building, running, initialising, saving and reporting read this table.

Written out, with ``G`` the tensor-parallel group::

    x -> enter -> A -> middle -> B -> (added to the base's output)

A magnitude of the output's rows (DoRA) is held as B is. Adding a kind of linear or a mode is adding a row.
"""

from dataclasses import dataclass
from enum import Enum


class Factor(Enum):
    """How a factor is held over the group."""

    REPLICATED = "replicated"
    RANK = "sharded on rank"
    INPUT = "sharded on d_in"
    OUTPUT = "sharded on d_out"

    def dim(self) -> int | None:
        """The dimension of the factor that is sharded; ``None`` if it is replicated."""
        return {Factor.REPLICATED: None, Factor.RANK: 0, Factor.INPUT: 1, Factor.OUTPUT: 0}[self]


class Sees(Enum):
    """What of the input a rank multiplies with A, and keeps."""

    ALL = "all of it"
    SEQUENCE = "its shard"
    FEATURES = "its shard of the features"


class Enter(Enum):
    """How the input reaches A. The three of column-parallel sites are wide: ``[S, B, H]``."""

    AS_IS = "as it is"
    GATHER = "gathered once with the base; its gradient reduce-scattered"
    REGATHER = "gathered inside A's product, again in backward; its gradient reduce-scattered"
    COPY = "as it is; its gradient all-reduced"


class Middle(Enum):
    """What happens to ``z = A x``, which is rank wide: ``[S, B, r]``."""

    AS_IS = "as it is"
    GATHER_SEQUENCE = "all-gather along the sequence; backward reduce-scatter"
    GATHER_RANK = "all-gather along rank; backward reduce-scatter"
    COPY = "as it is; backward all-reduce"
    REDUCE = "all-reduce; backward as it is"
    REDUCE_SCATTER = "reduce-scatter along the sequence; backward all-gather"


@dataclass(frozen=True)
class Placement:
    """One row.

    Args:
        kind: Kind of the base linear: ``column``, ``row`` or ``duplicated``.
        sequence: Whether activations outside the linear are sharded along the sequence.
        mode: ``gather``, ``regather`` or ``local``.
        a: How A is held.
        b: How B is held.
        enter: How the input reaches A.
        middle: What happens to z.
        sees: What of the input this rank keeps. Dropout masks agree over the group if that is all of it, else differ.
        sum_a: A is replicated and saw a part of the tokens: its gradient is summed over the group.
        sum_b: The same of B.
    """

    kind: str
    sequence: bool
    mode: str
    a: Factor
    b: Factor
    enter: Enter
    middle: Middle
    sees: Sees = Sees.ALL
    sum_a: bool = False
    sum_b: bool = False

    @property
    def name(self) -> str:
        """Short name, for the report."""
        return f"{self.kind}{', SP' if self.sequence else ''}: A {self.a.value}, B {self.b.value}"

    @property
    def wide(self) -> int:
        """Collectives of the input's width that the adapter adds to a step."""
        return {Enter.AS_IS: 0, Enter.GATHER: 1, Enter.REGATHER: 3, Enter.COPY: 1}[self.enter]

    @property
    def splits_output_tokens(self) -> bool:
        """Whether z and the output at B hold a shard of the sequence."""
        return self.sequence and self.kind != "column"


MODES = ("gather", "regather", "local")
_FACTORS_ON_RANK = (Factor.RANK, Factor.OUTPUT)
_COLUMN_LOCAL = (Factor.REPLICATED, Factor.OUTPUT)
_ROW = (Factor.INPUT, Factor.REPLICATED)
_COPIES = (Factor.REPLICATED, Factor.REPLICATED)


def _same_in(mode: str) -> tuple[Placement, ...]:
    """Row-parallel and duplicated linears, which are the same in every mode."""
    part = {"sum_a": True, "sum_b": True, "sees": Sees.SEQUENCE}
    return (
        Placement("row", True, mode, *_ROW, Enter.AS_IS, Middle.REDUCE_SCATTER, Sees.FEATURES, sum_b=True),
        Placement("row", False, mode, *_ROW, Enter.AS_IS, Middle.REDUCE, Sees.FEATURES),
        Placement("duplicated", True, mode, *_COPIES, Enter.AS_IS, Middle.AS_IS, **part),  # type: ignore[arg-type]
        Placement("duplicated", False, mode, *_COPIES, Enter.AS_IS, Middle.AS_IS),
    )


TABLE: tuple[Placement, ...] = (
    Placement("column", True, "gather", *_FACTORS_ON_RANK, Enter.GATHER, Middle.GATHER_RANK),
    Placement("column", True, "regather", *_FACTORS_ON_RANK, Enter.REGATHER, Middle.GATHER_RANK, Sees.SEQUENCE),
    Placement("column", True, "local", *_COLUMN_LOCAL, Enter.AS_IS, Middle.GATHER_SEQUENCE, Sees.SEQUENCE, sum_a=True),
    Placement("column", False, "gather", *_FACTORS_ON_RANK, Enter.COPY, Middle.GATHER_RANK),
    Placement("column", False, "local", *_COLUMN_LOCAL, Enter.AS_IS, Middle.COPY),
    *(row for mode in MODES for row in _same_in(mode)),
)


def lookup(kind: str, sequence: bool, mode: str) -> Placement:
    """The row for a site.

    Raises:
        KeyError: If the table has none.
    """
    for row in TABLE:
        if (row.kind, row.sequence, row.mode) == (kind, sequence, mode):
            return row
    raise KeyError(f"no placement for kind={kind!r}, sequence={sequence}, mode={mode!r}")
