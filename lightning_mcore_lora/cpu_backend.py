"""Run Megatron-Core on CPU processes (gloo), for machines without CUDA.

Megatron-Core assumes CUDA in a few lines. Each row of :data:`PATCHES` replaces one of those places while the
backend is active, and names the Megatron-Core line that needs it. With CUDA present nothing is ever touched.

The table of patches is shown in ``docs/cpu_backend.md``; ``tests/unit/test_cpu_backend.py`` fails when a row is no
longer found in Megatron-Core or no longer needed.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Args:
        target: ``"module:attribute.path"`` of what is replaced.
        build: Receives the original (or ``None`` if the attribute does not exist) and returns the replacement.
        needed_by: Module of Megatron-Core that needs the patch.
        line: The line there, as it stands in the source.
        why: What goes wrong without it.
        absent: Whether the attribute does not exist without Transformer Engine and is added.
        since: First Megatron-Core version that needs the patch.
        until: First one that no longer does.
    """

    target: str
    build: Callable[[Any], Any]
    needed_by: str
    line: str
    why: str
    absent: bool = False
    since: str = "0.16"
    until: str | None = None

    def owner(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's name."""
        module, path = self.target.split(":")
        *parents, name = path.split(".")
        return functools.reduce(getattr, parents, importlib.import_module(module)), name

    def applies(self) -> bool:
        """Whether the installed Megatron-Core has what this row replaces, or lacks what it adds."""
        owner, name = self.owner()
        return hasattr(owner, name) != self.absent


# ---------------------------------------------------------------------------------------------------------------------
# Replacements
# ---------------------------------------------------------------------------------------------------------------------


class _Stream:
    """Stands in for a CUDA stream: the CPU runs everything in order."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> "_Event":
        return _Event()


class _Event:
    """Stands in for the event that a stream records."""

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


_THE_STREAM = _Stream()


class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
    """Megatron-Core's random streams, kept on torch's CPU generator."""

    def add(self, name: str, seed: int) -> None:
        """Start stream ``name`` at ``seed``."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"random stream {name!r} or seed {seed} is already tracked")
        self._is_initialized = True
        self.seeds_.add(seed)
        outside = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)

    @contextmanager
    def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from stream ``name`` inside the context."""
        if name not in self.states_:
            raise KeyError(
                f"random stream {name!r} is not tracked (known: {sorted(self.states_)}): call Megatron-Core's "
                "model_parallel_cuda_manual_seed first"
            )
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


#: Outlives the backend: what is undone at teardown and applied again later goes on with the same streams.
_TRACKER = CpuRNGStatesTracker()


def _get_rng_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _model_parallel_seed(original: Callable) -> Callable:
    @functools.wraps(original)
    def seed_streams(
        seed: int,
        *args: Any,
        tp_rank: int | None = None,
        ep_rank: int | None = None,
        etp_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
        ep_rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
        etp_rank = parallel_state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
        tracker = random.get_cuda_rng_tracker()
        tracker.reset()
        torch.manual_seed(seed)
        # The same three streams and offsets as Megatron-Core's CUDA version.
        tracker.add(random._DATA_PARALLEL_RNG_TRACKER_NAME, seed)
        tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp_rank)
        tracker.add(random._EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + 100 * ep_rank + etp_rank)

    return seed_streams


def _on_cpu_autocast(original: Any, decorator: Callable) -> staticmethod:
    # `original` is the function that Megatron-Core wrapped for device_type="cuda"; `__wrapped__` is the plain one.
    return staticmethod(decorator(original.__wrapped__, device_type="cpu"))


def _plain_fp8_flag(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, fp8 or None, *args, **kwargs)

    return __init__


def _share_storage_by_copy(original: Callable) -> Callable:
    def share(destination: torch.Tensor, source: torch.Tensor) -> None:
        storage = source.untyped_storage()
        destination.untyped_storage().resize_(storage.size())
        destination.untyped_storage().copy_(storage)

    return lambda: share


def _causal_mask(original: Callable) -> Callable:
    @functools.wraps(original)
    def mask(sq: int) -> torch.Tensor:
        return torch.ones(sq, sq, dtype=torch.bool).triu(diagonal=1)

    return mask


def _sliding_window_mask(original: Callable) -> Callable:
    @functools.wraps(original)
    def mask(sq: int, skv: int, window_size: Sequence[int]) -> torch.Tensor:
        offset = torch.arange(skv)[None, :] - torch.arange(sq)[:, None] - (skv - sq)
        return (offset < -window_size[0]) | (offset > window_size[1])

    return mask


def _to_cpu_or_numpy(original: Callable) -> Callable:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _uneven_gather(original: Callable) -> Callable:
    @functools.wraps(original)
    def gather(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, None, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = padded.new_empty((group.size(), *padded.shape))
        torch.distributed.all_gather_into_tensor(gathered.flatten(0, 1), padded, group=group)
        return torch.cat([part[:n] for part, n in zip(gathered, sizes, strict=True)])

    return gather


def _expert_output_may_be_added_to(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = original(self, *args, **kwargs)
        # Megatron-Core returns its input unchanged from a one-process reduction: a view that may not be changed.
        return (output.clone() if self.is_expert and bias is not None else output), bias

    return forward


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

_LAYERS = "megatron.core.tensor_parallel.layers"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_RANDOM = "megatron.core.tensor_parallel.random"
_SOFTMAX = "megatron.core.fusions.fused_softmax"
_SHARED_EXPERTS = "megatron.core.transformer.moe.shared_experts"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _autocast_rows() -> Iterator[Patch]:
    for function in ("LinearWithFrozenWeight", "LinearWithGradAccumulationAndAsyncCommunication"):
        for method, decorator in (("forward", torch.amp.custom_fwd), ("backward", torch.amp.custom_bwd)):
            yield Patch(
                f"{_LAYERS}:{function}.{method}",
                functools.partial(_on_cpu_autocast, decorator=decorator),
                _LAYERS,
                f'custom_{method[:1]}wd = partial(torch.amp.custom_{method[:1]}wd, device_type="cuda")',
                "bf16-mixed: backward would meet float32 weights and bfloat16 gradients",
            )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.cuda:current_device",
        _constant(lambda: torch.device("cpu")),
        _MAPPINGS,
        "output = torch.empty(dim_size, dtype=input_.dtype, device=torch.cuda.current_device())",
        "every buffer is asked for on the current CUDA device",
    ),
    Patch(
        "torch.cuda:current_stream",
        _constant(lambda device=None: _THE_STREAM),
        _DISPATCHER,
        "on_side_stream = torch.cuda.current_stream() != self.cuda_dtoh_stream",
        "token dispatcher and shared experts order their streams",
    ),
    Patch(
        f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        _constant(_THE_STREAM),
        _DISPATCHER,
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cuda.Stream()",
        "the dispatcher makes a stream at construction and keeps it on the class",
    ),
    Patch(
        f"{_SHARED_EXPERTS}:SharedExpertMLP.stream",
        _constant(_THE_STREAM),
        _SHARED_EXPERTS,
        "torch.cuda.Stream()",
        "shared experts that overlap make a stream at construction and keep it on the class",
    ),
    Patch(
        "torch.cuda:synchronize",
        _constant(lambda device=None: None),
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "torch.cuda.synchronize()",
        "a checkpoint write waits for the device",
    ),
    Patch(
        f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER",
        _constant(_TRACKER),
        _RANDOM,
        "orig_rng_state = torch.cuda.get_rng_state()",
        "random streams live on the CUDA generator",
    ),
    Patch(
        f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER_INITIALIZED",
        _constant(True),
        _RANDOM,
        "if _CUDA_RNG_STATE_TRACKER_INITIALIZED:",
        "Megatron-Core would put its own tracker back",
    ),
    Patch(
        f"{_RANDOM}:model_parallel_cuda_manual_seed",
        _model_parallel_seed,
        _RANDOM,
        "torch.cuda.manual_seed(data_parallel_seed)",
        "the seed goes to the CUDA generator, which never takes it",
    ),
    Patch(
        f"{_RANDOM}:_get_cuda_rng_state",
        _constant(_get_rng_state),
        _RANDOM,
        "return torch.cuda.random.get_rng_state(device=device)",
        "activation recompute stores the CUDA generator's state",
    ),
    Patch(
        f"{_RANDOM}:_set_cuda_rng_state",
        _constant(_set_rng_state),
        _RANDOM,
        "_C._cuda_setRNGState(new_state)",
        "activation recompute queues calls for the CUDA generator, without end",
    ),
    Patch(
        f"{_RANDOM}:CheckpointWithoutOutput.__init__",
        _plain_fp8_flag,
        _RANDOM,
        "self.fp8 = fp8 is not None",
        "fp8=False counts as set, and Transformer Engine's names are missing",
    ),
    Patch(
        f"{_RANDOM}:_get_share_storage",
        _share_storage_by_copy,
        _RANDOM,
        "_share_storage_ext = load_inline(",
        "recomputed storages are shared by an extension that a compiler must build first",
        since="0.19",
    ),
    *_autocast_rows(),
    Patch(
        f"{_SOFTMAX}:get_default_causal_mask",
        _causal_mask,
        "megatron.core.transformer.utils",
        'return torch.triu(torch.ones(sq, sq, device="cuda"), diagonal=1).bool()',
        "the causal mask names its device",
    ),
    Patch(
        f"{_SOFTMAX}:get_sliding_window_causal_mask",
        _sliding_window_mask,
        "megatron.core.transformer.utils",
        'm = torch.ones(sq, skv, dtype=torch.bool, device="cuda")',
        "the sliding-window mask names its device",
    ),
    Patch(
        f"{_DISPATCHER}:maybe_move_tensor_to_cpu",
        _to_cpu_or_numpy,
        "megatron.core.transformer.moe.moe_utils",
        "if torch.is_tensor(tensor) and tensor.is_cuda:",
        "tensors that are on the CPU already are never made numpy arrays, as the all-to-all splits must be",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils:te_general_gemm",
        lambda original: original,
        "megatron.core.transformer.moe.moe_utils",
        "if te_general_gemm is not None and router_dtype != torch.float64:",
        "the router tests a name that only an import of Transformer Engine defines",
        absent=True,
        until="0.19",
    ),
    Patch(
        f"{_MAPPINGS}:_gather_along_first_dim",
        _uneven_gather,
        _MAPPINGS,
        "torch.distributed.all_gather(output_tensor_list, input_, group=group)",
        "gloo gathers equal sizes only (expert and expert-tensor parallel at once)",
    ),
    Patch(
        f"{_LAYERS}:RowParallelLinear.forward",
        _expert_output_may_be_added_to,
        "megatron.core.transformer.mlp",
        "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)",
        "an expert's bias is added in place to a returned view",
    ),
)

_applied: list[tuple[Any, str, Any]] = []
_depth = 0


def is_active() -> bool:
    """Whether the patches are in place now."""
    return _depth > 0


def apply(*, leave_out: str | None = None) -> None:
    """Put the patches in place; nested calls are counted. Does nothing where CUDA is available.

    Args:
        leave_out: Target of one patch not to apply, so that a test can show what it is needed for.
    """
    global _depth
    if torch.cuda.is_available():
        return
    _depth += 1
    if _depth > 1:
        return
    for patch in PATCHES:
        if patch.target == leave_out or not patch.applies():
            continue
        owner, name = patch.owner()
        original = vars(owner).get(name, _MISSING)
        _applied.append((owner, name, original))
        setattr(owner, name, patch.build(getattr(owner, name, None)))


def undo() -> None:
    """Undo one :func:`apply`; the last one restores every attribute to the very object it held before."""
    global _depth
    if _depth == 0:
        return
    _depth -= 1
    if _depth:
        return
    while _applied:
        owner, name, original = _applied.pop()
        if original is _MISSING:
            with contextlib.suppress(AttributeError):
                delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def active() -> Iterator[None]:
    """The backend in place inside the context."""
    apply()
    try:
        yield
    finally:
        undo()
