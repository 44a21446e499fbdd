"""What the user chooses about adapters."""

from dataclasses import dataclass

SEQUENCE_MODES = ("auto", "gather", "regather", "local")
DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class LoRAConfig:
    """Settings of low-rank adapters.

    Args:
        rank: Width r of the factors A ``[rank, d_in]`` and B ``[d_out, rank]``.
        alpha: The adapter's output is scaled by ``alpha / rank``.
        target_modules: Names of linears to adapt: the last component of a module's path.
        sequence_mode: What a column-parallel site does under sequence parallelism: ``"local"`` applies A to the
            sequence shard and gathers only the rank-wide result; ``"regather"`` keeps the shard and gathers the input
            again in backward; ``"gather"`` keeps the gathered input; ``"auto"`` is ``"local"`` wherever it is exact.
            ``gather`` and ``regather`` need a rank divisible by the tensor-parallel size.
        seed: Seed of the initial A. A does not depend on the parallel layout; B starts at zero.

    Raises:
        ValueError: If a setting is out of range, naming it.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = DEFAULT_TARGETS
    sequence_mode: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} must be a positive integer")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha!r} must be positive")
        if self.sequence_mode not in SEQUENCE_MODES:
            raise ValueError(f"sequence_mode={self.sequence_mode!r} must be one of {SEQUENCE_MODES}")
        if isinstance(self.target_modules, str):
            raise ValueError(f"target_modules={self.target_modules!r} must be a list of names, not one string")
        object.__setattr__(self, "target_modules", tuple(self.target_modules))  # a list, from YAML
        if not self.target_modules:
            raise ValueError("target_modules is empty: name at least one linear, for example 'linear_qkv'")

    @property
    def scale(self) -> float:
        """Factor s of the adapter's output."""
        return self.alpha / self.rank
