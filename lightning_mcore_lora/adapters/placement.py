r"""The placement table: how an adapter is laid out so that it leaves its output in the base linear's parallel state.

An adapter adds :math:`s B (A x)` to a base linear, :math:`s = \alpha / r`, :math:`A` of shape ``[rank, d_in]``,
:math:`B` of shape ``[d_out, rank]``. One row of :data:`TABLE` says, for one kind of linear, what surrounds it, and the
mode, how each factor is sharded, which collective sits between the steps, and which replicated factors get only a part
of their gradient on each rank, so that it must be summed. Building, running, initialising, saving and reporting read
this table.

Written out, for the linear's tensor-parallel group (of experts: the expert-tensor-parallel one)::

    x -> enter -> A -> middle -> B -> (added to the base's output)

A magnitude of the output's rows (DoRA) is held as B is. Adding a kind of linear or a mode is adding a row.
"""

from dataclasses import dataclass
from enum import Enum


class Around(Enum):
    """What a rank holds of the activations around a linear, and who sums what its shards leave partial."""

    WHOLE = ""
    SEQUENCE = "SP"
    #: A linear without collectives of its own: of an expert, or of shared experts that overlap their communication.
    #: Whoever runs it gathers its tokens, and sums its partial outputs and input gradients.
    REMOVED = "collectives removed"


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
        around: What surrounds it.
        mode: ``gather``, ``regather`` or ``local``.
        a: How A is held.
        b: How B is held.
        enter: How the input reaches A.
        middle: What happens to z.
        sees: What of the input this rank keeps. Dropout masks agree over the group if that is all of it, else differ.
        sum_a: A is replicated and its gradient is a part on each rank (of the tokens, or of the output's features): it
            is summed over the group.
        sum_b: The same of B.
    """

    kind: str
    around: Around
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
        where = ", ".join(filter(None, (self.kind, self.around.value)))
        return f"{where}: A {self.a.value}, B {self.b.value}"

    @property
    def wide(self) -> int:
        """Collectives of the input's width that the adapter adds to a step."""
        return {Enter.AS_IS: 0, Enter.GATHER: 1, Enter.REGATHER: 3, Enter.COPY: 1}[self.enter]

    @property
    def splits_output_tokens(self) -> bool:
        """Whether z and the output at B hold a shard of the sequence."""
        return self.around is Around.SEQUENCE and self.kind != "column"


MODES = ("gather", "regather", "local")
_FACTORS_ON_RANK = (Factor.RANK, Factor.OUTPUT)
_COLUMN_LOCAL = (Factor.REPLICATED, Factor.OUTPUT)
_ROW = (Factor.INPUT, Factor.REPLICATED)
_COPIES = (Factor.REPLICATED, Factor.REPLICATED)


def _same_in(mode: str) -> tuple[Placement, ...]:
    """What is the same in every mode: row-parallel and duplicated linears, and those without collectives."""
    part = {"sum_a": True, "sum_b": True, "sees": Sees.SEQUENCE}
    as_is = (Enter.AS_IS, Middle.AS_IS)
    return (
        Placement("row", Around.SEQUENCE, mode, *_ROW, Enter.AS_IS, Middle.REDUCE_SCATTER, Sees.FEATURES, sum_b=True),
        Placement("row", Around.WHOLE, mode, *_ROW, Enter.AS_IS, Middle.REDUCE, Sees.FEATURES),
        Placement("duplicated", Around.SEQUENCE, mode, *_COPIES, *as_is, **part),  # type: ignore[arg-type]
        Placement("duplicated", Around.WHOLE, mode, *_COPIES, *as_is),
        # dz is a part on each rank, and so is dx, as the base's is.
        Placement("column", Around.REMOVED, mode, *_COLUMN_LOCAL, *as_is, sum_a=True),
        # Each rank's B (A_i x_i) is a part of the output, as the base's is: z is not summed, or it would count twice.
        Placement("row", Around.REMOVED, mode, *_ROW, *as_is, Sees.FEATURES, sum_b=True),
    )


TABLE: tuple[Placement, ...] = (
    Placement("column", Around.SEQUENCE, "gather", *_FACTORS_ON_RANK, Enter.GATHER, Middle.GATHER_RANK),
    Placement(
        "column", Around.SEQUENCE, "regather", *_FACTORS_ON_RANK, Enter.REGATHER, Middle.GATHER_RANK, Sees.SEQUENCE
    ),
    Placement(
        "column",
        Around.SEQUENCE,
        "local",
        *_COLUMN_LOCAL,
        Enter.AS_IS,
        Middle.GATHER_SEQUENCE,
        Sees.SEQUENCE,
        sum_a=True,
    ),
    Placement("column", Around.WHOLE, "gather", *_FACTORS_ON_RANK, Enter.COPY, Middle.GATHER_RANK),
    Placement("column", Around.WHOLE, "local", *_COLUMN_LOCAL, Enter.AS_IS, Middle.COPY),
    *(row for mode in MODES for row in _same_in(mode)),
)


def lookup(kind: str, around: Around, mode: str) -> Placement:
    """The row for a site.

    Raises:
        KeyError: If the table has none.
    """
    for row in TABLE:
        if (row.kind, row.around, row.mode) == (kind, around, mode):
            return row
    raise KeyError(f"no placement for kind={kind!r}, around={around}, mode={mode!r}")
