"""Environment variables that must be in place before CUDA starts."""

from collections.abc import Mapping

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def cuda_defaults(environ: Mapping[str, str], tensor_parallel_size: int) -> dict[str, str]:
    """Variables to set for CUDA processes, where the user has not.

    - ``CUDA_DEVICE_MAX_CONNECTIONS=1`` under tensor parallelism: Megatron-Core overlaps a collective with a product by
      launching the collective first, which only one hardware queue keeps in order.
    - ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: batches of changing length fragment memory otherwise.

    Args:
        environ: The environment.
        tensor_parallel_size: TP.

    Returns:
        What to add.
    """
    defaults = {}
    if tensor_parallel_size > 1 and "CUDA_DEVICE_MAX_CONNECTIONS" not in environ:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not any(name in environ for name in ALLOCATOR_VARIABLES):
        defaults[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return defaults
