"""A model's linears with what stands around them, without weights or processes.

The adapters are planned on it as on the model itself, by the same tables: names, classes and shapes are those that
Megatron-Core's layer specs give, parameters are on the meta device, and groups only know their size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn

from lightning_mcore_lora.models.vocabulary import padded_size
from lightning_mcore_lora.parallel import ParallelSizes


@dataclass(frozen=True)
class GroupOf:
    """Stands for a process group."""

    count: int

    def size(self) -> int:
        """Its number of processes."""
        return self.count


@dataclass(frozen=True)
class Layers:
    """One row for each kind of layer spec.

    Args:
        prefix: Module that the linears' classes are in.
        column: Class of ``linear_qkv`` and of a dense ``linear_fc1``.
        plain_column: Class of a column-parallel linear that no norm is fused into.
        row: Class of a row-parallel linear.
        fuses_norms: Whether ``column`` holds the norm before it.
        features_per_rank: Whether a linear counts its features on one rank.
        attention: Class of the core attention.
    """

    prefix: str
    column: str
    plain_column: str
    row: str
    fuses_norms: bool
    features_per_rank: bool
    attention: str


_MCORE = "megatron.core.tensor_parallel.layers"
_TE = "megatron.core.extensions.transformer_engine"

LAYERS: dict[str, Layers] = {
    "local": Layers(
        _MCORE,
        "ColumnParallelLinear",
        "ColumnParallelLinear",
        "RowParallelLinear",
        fuses_norms=False,
        features_per_rank=False,
        attention="DotProductAttention",
    ),
    "te": Layers(
        _TE,
        "TELayerNormColumnParallelLinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
        fuses_norms=True,
        features_per_rank=True,
        attention="TEDotProductAttention",
    ),
}


def build_skeleton(
    config: TransformerConfig, sizes: ParallelSizes, layers: str, vocab_size: int, tied: bool
) -> nn.Module:
    """The skeleton of a GPT model on one rank.

    Args:
        config: Its config at the layout.
        sizes: The layout.
        layers: Name of a row of :data:`LAYERS`.
        vocab_size: Tokens, padding left out.
        tied: Whether the output layer is the embedding.
    """
    return _Builder(config, sizes, LAYERS[layers]).model(padded_size(vocab_size, sizes.tensor), tied)


def is_mixture(config: TransformerConfig) -> list[bool]:
    """Of each layer whether it holds experts."""
    frequency = config.moe_layer_freq
    if not config.num_moe_experts:
        return [False] * config.num_layers
    if isinstance(frequency, int):
        return [i % frequency == 0 for i in range(config.num_layers)]
    return [bool(value) for value in frequency]


class _Builder:
    def __init__(self, config: TransformerConfig, sizes: ParallelSizes, layers: Layers) -> None:
        self.config, self.sizes, self.layers = config, sizes, layers
        self.dtype = config.params_dtype

    def model(self, vocabulary: int, tied: bool) -> nn.Module:
        hidden = self.config.hidden_size
        words: Any = _module(_MCORE, "VocabParallelEmbedding")
        words.weight = self._empty(vocabulary // self.sizes.tensor, hidden)
        output = self._linear(_MCORE, "ColumnParallelLinear", hidden, vocabulary, bias=False)
        if tied:
            output.weight = None
        stack = _holder(
            layers=nn.ModuleList(self._layer(i, moe) for i, moe in enumerate(is_mixture(self.config))),
            final_layernorm=self._norm(hidden),
        )
        model = MegatronModule(self.config)
        model.embedding, model.decoder, model.output_layer = _holder(word_embeddings=words), stack, output
        return model

    def _layer(self, number: int, moe: bool) -> nn.Module:
        config, fused = self.config, self.layers.fuses_norms
        layer = _holder(
            self_attention=self._attention(),
            mlp=self._mixture() if moe else self._mlp(MLP, self.layers.column, config.ffn_hidden_size),
            **({} if fused else {"input_layernorm": self._norm(config.hidden_size)}),
            **({} if fused and not moe else {"pre_mlp_layernorm": self._norm(config.hidden_size)}),
        )
        layer.layer_number = number + 1
        return layer

    def _attention(self) -> nn.Module:
        config, row = self.config, self.layers
        query = config.num_attention_heads * config.kv_channels
        keys = 2 * config.num_query_groups * config.kv_channels
        bias = config.add_bias_linear or config.add_qkv_bias
        core = _module("", row.attention)
        if config.softmax_type == "learnable":
            core.softmax_offset = self._empty(config.num_attention_heads // self.sizes.tensor)
        attention = _holder(
            config,
            linear_qkv=self._linear(row.prefix, row.column, config.hidden_size, query + keys, bias),
            linear_proj=self._linear(row.prefix, row.row, query, config.hidden_size, config.add_bias_linear),
            core_attention=core,
        )
        if config.qk_layernorm:
            attention.q_layernorm, attention.k_layernorm = (self._norm(config.kv_channels) for _ in "qk")
        return attention

    def _mlp(self, cls: Any, column: str, width: int) -> nn.Module:
        config, row = self.config, self.layers
        mlp = cls.__new__(cls)
        nn.Module.__init__(mlp)
        mlp.config = config
        bias, up = config.add_bias_linear, width * (2 if config.gated_linear_unit else 1)
        mlp.linear_fc1 = self._linear(row.prefix, column, config.hidden_size, up, bias)
        mlp.linear_fc2 = self._linear(row.prefix, row.row, width, config.hidden_size, bias)
        return mlp

    def _mixture(self) -> nn.Module:
        config = self.config
        router = self._linear(
            "megatron.core.transformer.moe.router", "TopKRouter", config.hidden_size, config.num_moe_experts, False
        )
        router.bias = self._empty(config.num_moe_experts) if config.add_bias_linear else None
        router.weight.sequence_parallel = config.sequence_parallel
        parts: dict[str, Any] = {"router": router, "experts": self._experts()}
        width = config.moe_shared_expert_intermediate_size
        if width:
            shared = self._mlp(SharedExpertMLP, self.layers.plain_column, width)
            if config.moe_shared_expert_overlap:
                _remove_collectives(shared.linear_fc1)
                _remove_collectives(shared.linear_fc2)
            if config.moe_shared_expert_gate:
                shared.gate_weight = self._empty(1, config.hidden_size)
            parts["shared_experts"] = shared
        return _holder(config, **parts)

    def _experts(self) -> nn.Module:
        config = self.config
        width = config.moe_ffn_hidden_size or config.ffn_hidden_size
        count = config.num_moe_experts // self.sizes.expert
        up = width * (2 if config.gated_linear_unit else 1)
        shapes = {"linear_fc1": (config.hidden_size, up), "linear_fc2": (width, config.hidden_size)}
        if self.layers.features_per_rank and config.moe_grouped_gemm:
            kinds = {"linear_fc1": "TEColumnParallelGroupedLinear", "linear_fc2": "TERowParallelGroupedLinear"}
            return _holder(config, **{n: self._grouped(kinds[n], *shape, count) for n, shape in shapes.items()})
        kinds = {"linear_fc1": self.layers.plain_column, "linear_fc2": self.layers.row}
        return _holder(
            config,
            local_experts=nn.ModuleList(
                _holder(
                    config,
                    **{
                        name: _remove_collectives(
                            self._linear(
                                self.layers.prefix,
                                kinds[name],
                                *shape,
                                config.add_bias_linear,
                                size=self.sizes.expert_tensor,
                            )
                        )
                        for name, shape in shapes.items()
                    },
                )
                for _ in range(count)
            ),
        )

    def _grouped(self, kind: str, d_in: int, d_out: int, count: int) -> nn.Module:
        bias = self.config.add_bias_linear
        linear = self._linear(_TE, kind, d_in, d_out, bias=False, size=self.sizes.expert_tensor)
        shape = linear.weight.shape
        del linear.weight
        for i in range(count):
            setattr(linear, f"weight{i}", self._empty(*shape))
            linear.register_parameter(f"bias{i}", self._empty(shape[0]) if bias else None)
        linear.num_gemms = count
        return _remove_collectives(linear)

    def _linear(self, prefix: str, kind: str, d_in: int, d_out: int, bias: bool, size: int | None = None) -> Any:
        """A linear on one rank; a kind with neither word in its name is not split."""
        size = self.sizes.tensor if size is None else size
        split = (size if "Column" in kind else 1, size if "Row" in kind else 1)
        linear: Any = _module(prefix, kind)
        linear.weight = self._empty(d_out // split[0], d_in // split[1])
        linear.tp_group = linear._tp_group = GroupOf(size)
        linear.sequence_parallel = self.sizes.sequence_parallel
        if self.layers.features_per_rank and prefix == _TE:
            linear.in_features, linear.out_features = linear.weight.shape[1], linear.weight.shape[0]
            linear.parallel_mode = "column" if split[0] > 1 else "row"
        else:
            linear.input_size, linear.output_size = d_in, d_out
            linear.is_expert = linear.explicit_expert_comm = False
        linear.bias = self._empty(linear.weight.shape[0]) if bias else None
        if "LayerNorm" in kind:
            linear.layer_norm = self._norm(d_in)
        linear.config = self.config
        return linear

    def _norm(self, width: int) -> nn.Module:
        norm = _module("", "Norm")
        norm.weight = self._empty(width)
        if self.config.normalization == "LayerNorm":
            norm.bias = self._empty(width)
        return norm

    def _empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"))


def _remove_collectives(linear: Any) -> Any:
    linear.is_expert = linear.explicit_expert_comm = True
    linear.parallel_mode = None
    return linear


def _module(prefix: str, name: str) -> nn.Module:
    """A module whose class is called so, as the tables look it up."""
    return type(name, (nn.Module,), {"__module__": prefix, "__qualname__": name})()


def _holder(config: Any = None, **children: nn.Module) -> Any:
    holder: Any = nn.Module()
    if config is not None:
        holder.config = config
    for name, child in children.items():
        setattr(holder, name, child)
    return holder
