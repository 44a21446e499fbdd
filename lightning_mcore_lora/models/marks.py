"""Marks on the parameters of a model, by which gradients are reduced and counted, and shards are saved."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from lightning_mcore_lora.parallel import experts_are_apart

_SHARDED_DIM = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}


def mark_parameters(model: nn.Module) -> None:
    """Complete Megatron-Core's marks; may be called again.

    It marks sharded weights only where it initialises them, Transformer Engine takes fused gate and up for one block: a
    whole tensor put together by that would have gate and up of each shard in turn, and be wrong at any other size.
    """
    for name, module in model.named_modules():
        path = name.split(".")
        for cls, dim in _SHARDED_DIM.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, cls) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, dim, 1)
        gated = getattr(getattr(module, "config", None), "gated_linear_unit", False)
        for owned, parameter in module.named_parameters(recurse=False):
            if path[-1] == "linear_fc1" and gated and owned.startswith(("weight", "bias")):
                parameter.partition_dim, parameter.partition_stride = 0, 2
            if owned == "softmax_offset" and not hasattr(parameter, "tensor_model_parallel"):  # one sink for each head
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            if "experts" in path and not hasattr(parameter, "experts"):
                parameter.allreduce = not experts_are_apart()


def master_of(parameter: Any) -> Any:
    """What an optimizer trains for a parameter: its float32 master, where a strategy has made one, or itself."""
    return getattr(parameter, "float32_master", parameter)
