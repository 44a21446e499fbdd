"""Sites: the linears of a model that an adapter can sit beside. One type of linear is one row of :data:`LINEARS`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LinearType:
    """One row of :data:`LINEARS`.

    Args:
        cls: The class of the linear.
        kind: Its kind in the placement table.
        on_gathered_input: Runs the linear's forward on an input that has been gathered along the sequence already.
    """

    cls: type[nn.Module]
    kind: str
    on_gathered_input: Callable[..., Any] | None = None


def _column_on_gathered_input(linear: Any, base: Callable[..., Any], full: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Without sequence parallelism the linear would all-reduce its input's gradient; `disable_grad_reduce` leaves the
    # partial gradient to whoever gathered the input.
    before = linear.sequence_parallel, linear.disable_grad_reduce
    linear.sequence_parallel, linear.disable_grad_reduce = False, True
    try:
        return base(full, *args, **kwargs)
    finally:
        linear.sequence_parallel, linear.disable_grad_reduce = before


LINEARS: tuple[LinearType, ...] = (
    LinearType(ColumnParallelLinear, "column", _column_on_gathered_input),
    LinearType(RowParallelLinear, "row"),
)


@dataclass(frozen=True)
class Site:
    """One linear of a model.

    Args:
        name: Path of the module in the Megatron-Core model.
        linear: The module.
        type: Its row of :data:`LINEARS`.
    """

    name: str
    linear: Any
    type: LinearType

    @property
    def kind(self) -> str:
        """Kind in the placement table."""
        return self.type.kind

    @property
    def group(self) -> ProcessGroup:
        """The tensor-parallel group of the linear."""
        return self.linear.tp_group

    @property
    def d_in(self) -> int:
        """Input features over all ranks."""
        return self.linear.input_size

    @property
    def d_out(self) -> int:
        """Output features over all ranks."""
        return self.linear.output_size

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to a mixture-of-experts expert."""
        return self.linear.is_expert

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations around it are sharded along the sequence."""
        return self.linear.sequence_parallel and self.group.size() > 1

    @property
    def output_parts(self) -> int:
        """Blocks of the output that are sharded each for itself: 2 for gate and up in one linear, else 1."""
        return 2 if self.leaf == "linear_fc1" and self.linear.config.gated_linear_unit else 1

    @property
    def leaf(self) -> str:
        """Last component of the path."""
        return self.name.rpartition(".")[2]

    def on_gathered_input(self, base: Callable[..., Any], full: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``base`` on the gathered input; its gradient stays partial."""
        assert self.type.on_gathered_input is not None
        return self.type.on_gathered_input(self.linear, base, full, *args, **kwargs)


def find_sites(model: nn.Module) -> Iterator[Site]:
    """Every linear of the model that a row of :data:`LINEARS` describes.

    Names begin inside the Megatron-Core model, whatever it is wrapped in, so that equal models get equal adapters.
    """
    root: str | None = None
    for name, module in model.named_modules():
        if isinstance(module, MegatronModule) and (root is None or not name.startswith(root)):
            root = f"{name}." if name else ""
        for row in LINEARS:
            if type(module) is row.cls:
                yield Site(name.removeprefix(root or ""), module, row)
