"""Environment variables that must be in place before CUDA starts."""

from collections.abc import Mapping

from lightning_mcore_lora.memory.allocator import VARIABLES
from lightning_mcore_lora.memory.situation import Situation, torch_version


def cuda_defaults(environ: Mapping[str, str], tensor_parallel_size: int) -> dict[str, str]:
    """Variables to set for CUDA processes, where the user has not.

    - ``CUDA_DEVICE_MAX_CONNECTIONS=1`` under tensor parallelism: Megatron-Core overlaps a collective with a product by
      launching the collective first, which only one hardware queue keeps in order.
    - ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: batches of changing length fragment memory otherwise. Not
      where NCCL's user buffers or its registration of CUDA graphs are asked for and do not fit them.
    - ``NCCL_GRAPH_REGISTER=0`` with them, without which CUDA graphs would not fit.

    Args:
        environ: The environment.
        tensor_parallel_size: TP.

    Returns:
        What to add.
    """
    defaults = {}
    if tensor_parallel_size > 1 and "CUDA_DEVICE_MAX_CONNECTIONS" not in environ:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    situation = Situation(environ=environ, torch_version=torch_version())
    registers = environ.get("NCCL_GRAPH_REGISTER", "0") != "0"  # by the user's own wish
    if not situation.buffers_refuse_expandable and not registers and not any(name in environ for name in VARIABLES):
        defaults |= {VARIABLES[0]: "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
    return {name: value for name, value in defaults.items() if name not in environ}
