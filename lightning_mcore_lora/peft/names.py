"""Where the linears of a Megatron-Core model are in a transformers model, and on disk."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_mcore_lora.models.families import Weight
from lightning_mcore_lora.models.hf_config import HFConfig
from lightning_mcore_lora.models.layouts import Heads

_LINEAR = re.compile(r"(?:linear_\w+|router|output_layer)\.weight")
_ONE_EXPERT = re.compile(r"local_experts\.\{local\}\.")


@dataclass(frozen=True)
class Target:
    """One linear of the Megatron-Core model.

    Args:
        site: Its name.
        weight: Its row of the family's mapping, for its layer.
        by_parameter: Whether PEFT reaches them only by ``target_parameters``.
    """

    site: str
    weight: Weight
    by_parameter: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of transformers' parameters: of each linear fused in it, or of the one that holds all experts."""
        return self.weight.parameters

    @property
    def is_expert(self) -> bool:
        """Whether it is one of experts."""
        return self.weight.is_expert


@dataclass(frozen=True)
class OnDisk:
    """What one tensor of a base model's files is of a transformers parameter.

    Args:
        parameter: Name of the parameter.
        expert: Number of the expert whose weight it is; ``None`` if it is all of the parameter.
        part: Number of the block of output rows that it is, and how many there are.
        transposed: Whether it holds the input dimension before the output's.
    """

    parameter: str
    expert: int | None = None
    part: tuple[int, int] = (0, 1)
    transposed: bool = False


class Names:
    """Names of one model.

    Args:
        hf: Its Hugging Face config.
    """

    def __init__(self, hf: HFConfig) -> None:
        self.hf = hf
        self.experts: int = hf.transformer.get("num_moe_experts") or 0
        self.heads = Heads(hf.transformer["num_query_groups"], hf.transformer["kv_channels"])
        self.targets = {target.site: target for target in self._targets()}
        self.by_parameter = {p: t for t in self.targets.values() for p in t.parameters}
        self.on_disk = {name: where for target in self.targets.values() for name, where in self._on_disk(target)}

    def _weights(self) -> Iterator[Weight]:
        """The rows of the mapping for each layer; of experts still for all."""
        frequency = self.hf.transformer.get("moe_layer_freq", 1)
        for weight in self.hf.family.weights:
            if "{i}" not in weight.mcore[0]:
                yield weight
                continue
            for i in range(self.hf.transformer["num_layers"]):
                is_mixture = self.experts and (frequency == 1 or frequency[i])
                if ".mlp." in weight.mcore[0] and (".mlp.linear_" in weight.mcore[0]) == bool(is_mixture):
                    continue
                # {e} and {local} stay.
                names = {
                    kind: tuple(name.replace("{i}", str(i)) for name in getattr(weight, kind))
                    for kind in ("mcore", "hf")
                }
                parameter = weight.parameter and weight.parameter.replace("{i}", str(i))
                yield replace(weight, mcore=names["mcore"], hf=names["hf"], parameter=parameter)

    def _targets(self) -> Iterator[Target]:
        for weight in self._weights():
            name = _ONE_EXPERT.sub("", weight.mcore[0])
            if not _LINEAR.fullmatch(".".join(name.split(".")[-2:])):
                continue
            leaf = weight.parameters[0].split(".")[-2]
            by_parameter = weight.parameter is not None or leaf in self.hf.family.renamed
            yield Target(name.removesuffix(".weight"), weight, by_parameter)

    def trained(self) -> dict[str, Weight]:
        """Every row that one parameter of the Megatron-Core model has, by each of its names."""
        return {name: weight for weight in self._weights() if not weight.is_expert for name in weight.mcore}

    def _on_disk(self, target: Target) -> Iterator[tuple[str, OnDisk]]:
        weight = target.weight
        if not target.is_expert:
            parameters = target.parameters if weight.parameter is None else target.parameters * len(weight.hf)
            yield from ((name, OnDisk(parameter)) for name, parameter in zip(weight.hf, parameters, strict=True))
        elif weight.layout.packed:
            yield weight.hf[0], OnDisk(target.parameters[0], transposed=True)
        else:
            count = len(weight.hf)
            for e in range(self.experts):
                for i, name in enumerate(weight.hf):
                    yield name.replace("{e}", str(e)), OnDisk(target.parameters[0], e, (i, count))


def module_of(parameter: str) -> str:
    """The module that holds a parameter."""
    return parameter.rpartition(".")[0]
