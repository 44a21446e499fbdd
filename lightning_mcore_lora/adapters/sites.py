"""Sites: the linears of a model that an adapter can sit beside, and where in the model they are."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_mcore_lora.adapters.linears import Facts, LinearType, linear_type
from lightning_mcore_lora.adapters.placement import Around

#: Where Megatron-Core's ``SequentialMLP`` holds its experts.
_SEQUENTIAL = re.compile(r"(?:(.+)\.)?local_experts\.(\d+)\.(.+)")


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
    """One linear of a model, or the same linear of all experts that a rank holds in a layer.

    Args:
        name: Path of the module in the Megatron-Core model; layers are numbered over all pipeline stages. That of
            experts is ``...experts.linear_fc1``, whether one module holds them or each has its own.
        linears: The module; of experts that have their own, each one's.
        type: Its row of :data:`~lightning_mcore_lora.adapters.linears.LINEARS`.
        parents: The modules that hold the (first) linear, from the nearest on.
        like: A parameter with the dtype and device of the model.
        sequential: Whether it stands for linears of experts that run one after the other.
    """

    name: str
    linears: tuple[Any, ...]
    type: LinearType
    parents: tuple[nn.Module, ...]
    like: Tensor
    sequential: bool = False

    @property
    def linear(self) -> Any:
        """The module; of several the first."""
        return self.linears[0]

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
    def around(self) -> Around:
        """What surrounds it, in the placement table's words."""
        return self.facts.around

    @cached_property
    def experts(self) -> int:
        """Experts whose linears this rank holds here; 0 if it is no expert's."""
        if self.type.grouped:
            return self.linear.num_gemms
        return len(self.linears) if self.sequential else 0

    @property
    def holder(self) -> nn.Module:
        """The module that runs all experts: of experts in sequence two steps above the one that holds a linear."""
        return self.parents[2 if self.sequential else 0]

    @property
    def has_weights(self) -> bool:
        """Whether it has a weight of its own; a tied output layer has none."""
        return getattr(self.linear, "weight0" if self.type.grouped else "weight", None) is not None

    def weights(self) -> list[Tensor]:
        """This rank's part of the weight; of experts each one's."""
        if self.type.grouped:
            return [getattr(self.linear, f"weight{i}") for i in range(self.experts)]
        return [linear.weight for linear in self.linears]

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
    """Every linear of the model that is of a known type; those of experts that run one after the other are one."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    modules = dict(model.named_modules())
    found: dict[str, Site] = {}
    for path, name in module_names(model).items():
        linear = modules[path]
        row = linear_type(linear)
        if row is None or like is None:
            continue
        expert = _SEQUENTIAL.fullmatch(name)
        if expert:
            name = ".".join(filter(None, (expert[1], expert[3])))
            if name in found:
                found[name] = replace(found[name], linears=(*found[name].linears, linear))
                continue
        above = [path.rsplit(".", i)[0] for i in range(1, path.count(".") + 1)] + ([""] if path else [])
        weight = getattr(linear, "weight0" if row.grouped else "weight", None)
        parents = tuple(modules[p] for p in above)
        found[name] = Site(name, (linear,), row, parents, weight if weight is not None else like, expert is not None)
    yield from found.values()


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
