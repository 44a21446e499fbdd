"""Sites: the linears of a model that an adapter can sit beside, and where in the model they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.linears import Facts, LinearType, linear_type


@dataclass(frozen=True)
class Part:
    """One of the linears of a Hugging Face model that a fused linear holds.

    Args:
        name: ``q``, ``k``, ``v``, ``gate`` or ``up``.
        rows: Rows of it in each block.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class Site:
    """One linear of a model.

    Args:
        name: Path of the module in the Megatron-Core model; layers are numbered over all pipeline stages.
        linear: The module.
        type: Its row of :data:`~lightning_mcore_lora.adapters.linears.LINEARS`.
        parents: The modules that hold it, from the nearest on.
        like: A parameter with the dtype and device of the model.
    """

    name: str
    linear: Any
    type: LinearType
    parents: tuple[nn.Module, ...]
    like: Tensor

    @cached_property
    def facts(self) -> Facts:
        """What the adapter must know of the linear."""
        return self.type.facts(self.linear)

    @property
    def kind(self) -> str:
        """Kind in the placement table."""
        return self.type.kind

    @property
    def group(self) -> ProcessGroup:
        """The tensor-parallel group of the linear."""
        return self.facts.group

    @property
    def d_in(self) -> int:
        """Input features over all ranks."""
        return self.facts.d_in

    @property
    def d_out(self) -> int:
        """Output features over all ranks."""
        return self.facts.d_out

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations around it are sharded along the sequence."""
        return self.facts.sequence

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to a mixture-of-experts expert."""
        return "experts" in self.name.split(".")

    @property
    def leaf(self) -> str:
        """Last component of the path."""
        return self.name.rpartition(".")[2]

    @property
    def config(self) -> Any:
        """Megatron-Core's config of the model around it, or ``None``."""
        return next((m.config for m in (self.linear, *self.parents) if hasattr(m, "config")), None)

    @property
    def output_parts(self) -> int:
        """Blocks of the output that are sharded each for itself: 2 for gate and up in one linear, else 1."""
        return 2 if self.leaf == "linear_fc1" and self.config.gated_linear_unit else 1

    def parts(self) -> tuple[Part, ...]:
        """The linears that are fused in it, with their rows in each block of this rank's output; none if it is one.

        A block is one query group of ``linear_qkv``, all of ``linear_fc1``.
        """
        config, size = self.config, self.group.size()
        if self.output_parts == 2:
            rows = self.d_out // size // 2
            return Part("gate", rows), Part("up", rows)
        if self.leaf != "linear_qkv":
            return ()
        groups = config.num_query_groups or config.num_attention_heads
        head = config.kv_channels
        parts = Part("q", config.num_attention_heads // groups * head), Part("k", head), Part("v", head)
        return parts if groups * sum(part.rows for part in parts) == self.d_out else ()


def find_sites(model: nn.Module) -> Iterator[Site]:
    """Every linear of the model that is of a known type."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    modules = dict(model.named_modules())
    for path, name in module_names(model).items():
        row = linear_type(modules[path])
        if row is None or like is None:
            continue
        above = [path.rsplit(".", i)[0] for i in range(1, path.count(".") + 1)] + ([""] if path else [])
        linear = modules[path]
        weight = getattr(linear, "weight", None)
        yield Site(name, linear, row, tuple(modules[p] for p in above), weight if weight is not None else like)


def module_names(model: nn.Module) -> dict[str, str]:
    """Path to name of every module.

    Names begin inside the Megatron-Core model, whatever it is wrapped in, and number layers as Megatron-Core does over
    all pipeline stages, so that equal models get equal adapters.
    """
    names: dict[str, str] = {}
    root: str | None = None
    for path, module in model.named_modules():
        if isinstance(module, MegatronModule) and not (root is not None and _is_inside(path, root)):
            root, names[path] = path, ""
            continue
        parent, _, leaf = path.rpartition(".")
        if leaf.isdigit() and isinstance(getattr(module, "layer_number", None), int):
            leaf = str(module.layer_number - 1)
        names[path] = ".".join(filter(None, (names.get(parent), leaf)))
    return names


def _is_inside(path: str, root: str) -> bool:
    return not root or path.startswith(f"{root}.")
