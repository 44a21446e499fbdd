"""Transformer Engine without a GPU: its own Python code runs, on CPU kernels in place of its compiled ones.

Everything above the compiled module ``transformer_engine_torch`` is Transformer Engine's: the layers, their autograd
functions, forward and backward, and the collectives. Only the kernels are ours: GEMM, norms and attention, without FP8,
user buffers or fused gradient accumulation. What is not stood in for raises when called. What Transformer Engine does
wrong shows here too: version 2.20.2 drops the gradient of a layer norm output that it returns gathered.

Use: :func:`install` before the first import of Megatron-Core or Transformer Engine, then with parallel groups in place
:func:`build`, and run the model inside :func:`cpu_kernels`.
"""

import enum
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor

COMPILED = "transformer_engine_torch"
#: What Transformer Engine imports for ONNX export and paged inference, stood in for while it is imported.
UNUSED = ("onnx", "onnxscript", "einops")
HIDDEN, HEADS, FFN, VOCAB, SEQUENCE = 24, 4, 48, 64, 8

# ---------------------------------------------------------------------------------------------------------------------
# The compiled module
# ---------------------------------------------------------------------------------------------------------------------


class _Name(type):
    """A class of no content for each name that is only mentioned: annotation, base, key or member of an enum."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _Name(f"{cls.__name__}.{name}", (), {}))
        return getattr(cls, name)

    def __int__(cls) -> int:  # members of enums become numbers, which only have to differ
        return id(cls)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{COMPILED}.{cls.__name__} has no stand-in on CPU")


class _Compiled(types.ModuleType):
    """The module in which every name exists."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Name(name, (), {}))
        return getattr(self, name)


_ENUMS = (
    # Transformer Engine mirrors these two, and checks that the members are the same.
    enum.IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", start=0),
    enum.IntEnum("NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8", start=-1),
)

# The kernels that a dense model needs, with the arguments of Transformer Engine's calls.


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    grad: bool,
    *workspace_and_accumulation: Any,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """``op(b) @ op(a)``; with ``grad`` the gradient of a bias is summed up, without it the bias is added."""
    if out is not None or quantizer is not None or gelu or comm_overlap is not None or alpha != 1.0:
        raise NotImplementedError("the CPU GEMM writes no given output, and knows no FP8, GELU or overlap")
    if transpose_b:  # a weight's gradient: the sum over all tokens
        a, b = a.flatten(0, -2), b.flatten(0, -2)
    result = (b.mT if transpose_b else b) @ (a.mT if transpose_a else a)
    if bias is None:
        return result, None, None, None
    if grad:
        return result, b.sum(0), None, None
    return result + bias, None, None, None


def te_general_grouped_gemm(
    a: list[Tensor],
    transpose_a: bool,
    b: list[Tensor],
    transpose_b: bool,
    out: list[Tensor],
    out_dtype: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_input: list[Tensor],
    grad: bool,
    *workspace_and_accumulation: Any,
) -> list[Tensor]:
    """Products of each expert's tokens with its weight, written one below the other."""
    if transpose_b or not single_output:
        raise NotImplementedError("the CPU grouped GEMM knows no gradients of weights")
    for part, tokens, weight, offset in zip(out[0].split(m_splits), b, a, bias, strict=True):
        product = tokens @ (weight.mT if transpose_a else weight)
        part.copy_(product + offset if offset.numel() and not grad else product)
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """Output and the reciprocal deviations that the backward pass reads."""
    _refuse(out, quantizer)
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x * scale[:, None] * _gamma(weight, zero_centered)).to(x.dtype), None, scale


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    normed = x * scale[:, None]
    inner = grad * _gamma(weight, zero_centered)
    inner = inner - normed * (inner * normed).mean(-1, keepdim=True)
    return (inner * scale[:, None]).to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, means and reciprocal deviations."""
    mean = x.float().mean(-1)
    normed, _, scale = rmsnorm_fwd(x - mean[:, None], weight, eps, out, quantizer, dtype, margin, zero_centered)
    return (normed + bias).to(x.dtype), mean, scale


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    dx, dweight = rmsnorm_bwd(grad, x - mean[:, None], scale, weight, margin, zero_centered)
    return (dx - dx.mean(-1, keepdim=True)).to(x.dtype), dweight, grad.sum(0)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight + 1 if zero_centered else weight


def _refuse(*unsupported: Any) -> None:
    if any(value is not None for value in unsupported):
        raise NotImplementedError("the CPU norms write no given output and know no FP8")


_KERNELS = (generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)


def install() -> None:
    """Put the stand-in into ``sys.modules`` and import Transformer Engine on top of it.

    Raises:
        RuntimeError: If Megatron-Core was imported before, and so without Transformer Engine.
    """
    if isinstance(sys.modules.get(COMPILED), _Compiled):
        return
    if "megatron.core" in sys.modules or "transformer_engine" in sys.modules:
        raise RuntimeError("install() must come before the first import of Megatron-Core or Transformer Engine")
    module = _Compiled(COMPILED)
    vars(module).update({real.__name__: real for real in (*_ENUMS, *_KERNELS)})
    module.__spec__ = importlib.machinery.ModuleSpec(COMPILED, None)
    sys.modules[COMPILED] = module
    importlib.import_module("torch._dynamo")  # looks for onnx, and would find a stand-in without a spec
    missing = [name for name in UNUSED if importlib.util.find_spec(name) is None]
    sys.modules |= dict.fromkeys(missing, mock.MagicMock())
    try:
        # NVTE_PROJECT_BUILDING: the shared libraries, which need cuDNN and the like, are not loaded.
        with mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first attempt at the package's torch part finds no compiled module
            common = importlib.import_module("transformer_engine.common")
            with mock.patch.object(common, "load_framework_extension"):
                importlib.import_module("transformer_engine.pytorch")
    finally:
        for name in missing:
            del sys.modules[name]


# ---------------------------------------------------------------------------------------------------------------------
# Construction and running
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def active() -> Iterator[None]:
    """Transformer Engine's layers can be constructed inside: they ask whether there is a GPU, and hear yes."""
    from lightning_mcore_lora import cpu_backend

    with cpu_backend.active(), mock.patch.object(torch.cuda, "is_available", return_value=True):
        yield


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Transformer Engine's layers can run inside, forward and backward."""
    from transformer_engine.pytorch import DotProductAttention, cpp_extensions, utils
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    from lightning_mcore_lora import cpu_backend

    def prepare_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Refuses what is not on a GPU.
        with mock.patch.object(Tensor, "is_cuda", True, create=True):
            return original(self, x, *args, **kwargs)

    original = TransformerEngineBaseModule.prepare_forward
    with ExitStack() as stack:
        stack.enter_context(cpu_backend.active())
        for owner, name, value in (
            (TransformerEngineBaseModule, "prepare_forward", prepare_forward),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (cpp_extensions.gemm, "get_cublas_workspace", lambda *args: torch.empty(1, 1)),
            (cpp_extensions.gemm, "get_sm_count", lambda: 1),
            (cpp_extensions.gemm, "_empty_tensor", lambda: torch.empty(0)),
            (utils, "_empty_tensor", lambda: torch.empty(0)),  # what freed tensors are left with
            (DotProductAttention, "forward", _attention),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, attn_mask_type: str, **options: Any
) -> Tensor:
    """Causal attention of ``[sequence, batch, head, channel]`` tensors, heads flattened in the output."""
    if attn_mask_type != "causal" or options or self.attention_dropout or self.softmax_type != "vanilla":
        raise NotImplementedError(f"CPU attention is causal only (got {attn_mask_type}, {sorted(options)})")
    heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=self.softmax_scale, enable_gqa=True
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def build(num_moe_experts: int | None = None, **config: Any) -> Any:
    """A small GPT of Megatron-Core's Transformer Engine layers, on the parallel groups that stand now.

    Args:
        num_moe_experts: Experts of each layer, grouped; none for a dense model.
        **config: Fields of the ``TransformerConfig`` that differ from the defaults here.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    tensor = parallel_state.get_tensor_model_parallel_world_size()
    defaults = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
    }
    if num_moe_experts:
        defaults |= {
            "num_moe_experts": num_moe_experts,
            "moe_ffn_hidden_size": FFN,
            "moe_router_topk": 2,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    transformer_config = TransformerConfig(**(defaults | config))
    with active():
        return GPTModel(
            transformer_config,
            get_gpt_decoder_block_spec(
                transformer_config, use_transformer_engine=True, normalization=transformer_config.normalization
            ),
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            parallel_output=True,
        )
