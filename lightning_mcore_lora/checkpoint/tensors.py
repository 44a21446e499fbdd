"""The tensors of a module, by what becomes of them in a checkpoint."""

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_mcore_lora.adapters import adapters
from lightning_mcore_lora.checkpoint.shards import is_numbered_expert
from lightning_mcore_lora.models.marks import mark_parameters, master_of


@dataclass(frozen=True)
class Tensors:
    """The tensors of a module.

    Args:
        module: The module.
        trained: Name to each trainable parameter, or its float32 master, and to frozen factors of adapters.
        buffers: Name to each persistent buffer.
        frozen: Name to every other parameter.
    """

    module: nn.Module
    trained: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    frozen: dict[str, nn.Parameter]

    @property
    def all(self) -> dict[str, Tensor]:
        """Everything, by name."""
        return {**self.frozen, **self.buffers, **self.trained}


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors of a module."""
    mark_parameters(module)
    factors = {id(p) for _, adapter in adapters(module) for p in adapter.parameters()}
    trained, frozen = {}, {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or id(parameter) in factors:
            trained[name] = master_of(parameter)
        else:
            frozen[name] = parameter
    buffers = {
        f"{path}.{name}" if path else name: buffer
        for path, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }
    return Tensors(module, trained, buffers, frozen)


def check_can_load(module: nn.Module) -> None:
    """Check that what is loaded will count.

    Raises:
        ValueError: If adapters are merged into the base.
    """
    for _, adapter in adapters(module):
        adapter.check_works()


def check_can_save(module: nn.Module, everything: bool) -> None:
    """Check that what is to be saved is what it seems, and has a place in a checkpoint.

    Args:
        module: The module.
        everything: Whether the frozen base is saved too.

    Raises:
        ValueError: If adapters are merged into the base.
        NotImplementedError: If experts are to be saved whose weights are not told apart by name.
    """
    check_can_load(module)
    unnamed = [
        name
        for name, p in module.named_parameters()
        if (p.requires_grad or everything)
        and ".experts." in name
        and not hasattr(p, "experts")
        and not is_numbered_expert(name)
    ]
    if unnamed:
        way_out = "leave save_base_weights out" if everything else f"freeze {unnamed[:3]} ..."
        raise NotImplementedError(
            f"{'saving' if everything else 'training'} grouped expert weights is not supported yet, only "
            f"SequentialMLP's: {way_out}"
        )
