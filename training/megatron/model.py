"""GPTModel from a Hugging Face config, with the local (pure torch) layer spec.

Invariants:
- The numeric choices that the library would default differently by version are set here: fp32 routing, no fusions,
  no dropout, no auxiliary loss, attention from `PackedAttention`, RMSNorm from `norm`.
- A model owns its routers' replay objects; the library's global list is left empty, so that two models in one process
  never drive each other.
- Weights are allocated, not initialised: they always come from a file.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from segue.errors import TrainerError
from training.megatron import compat
from training.megatron.attention import PackedAttention, PlannedSeqParams, RopeSettings
from training.megatron.norm import RMSNorm
from training.megatron.shape import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, dtype: torch.dtype, *, routing_replay: bool) -> compat.TransformerConfig:
    """The library's config for this shape; every value that changes numbers is explicit."""
    moe = shape.moe
    sparse = (
        {}
        if moe is None
        else {
            "num_moe_experts": moe.experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.hidden,
            "moe_layer_freq": [int(shape.is_sparse(i)) for i in range(shape.layers)],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_pre_softmax": not moe.renormalise,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_router_fusion": False,
            "moe_permute_fusion": False,
            "moe_enable_routing_replay": routing_replay,
        }
    )
    with compat.quiet():
        return compat.TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.groups,
            kv_channels=shape.head_dim,
            ffn_hidden_size=shape.ffn_hidden,
            activation_func=functional.silu,
            gated_linear_unit=True,
            normalization="RMSNorm",
            layernorm_epsilon=shape.norm_eps,
            qk_layernorm=shape.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=shape.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            moe_token_dispatcher_type="alltoall",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            calculate_per_token_loss=True,
            perform_initialization=False,
            **sparse,
        )


def _layer_spec(shape: ModelShape, layer: int) -> Any:
    experts = shape.moe.experts if shape.moe is not None and shape.is_sparse(layer) else None
    spec: Any = compat.get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    rope = RopeSettings(shape.rope_theta, shape.rope_llama3)
    attention.core_attention = functools.partial(PackedAttention, rope=rope)
    if shape.qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return spec


class Policy(torch.nn.Module):
    """A GPTModel with its shape and its routers, called on packs.

    `module` is the library's model (wrapped for bf16 where asked); `routers` are the replay objects of the sparse
    layers in layer order, empty unless built with routing_replay.
    """

    def __init__(self, shape: ModelShape, dtype: str, *, routing_replay: bool = False) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise TrainerError(f"dtype {dtype!r} is not one of {sorted(DTYPES)}")
        if routing_replay and shape.moe is None:
            raise TrainerError(f"routing replay was asked of a {shape.family} model, which has no router")
        config = transformer_config(shape, DTYPES[dtype], routing_replay=routing_replay)
        with compat.quiet(), compat.device_literals():
            layers: Any = compat.TransformerBlockSubmodules(
                layer_specs=[_layer_spec(shape, i) for i in range(shape.layers)], layer_norm=RMSNorm
            )
            model = compat.GPTModel(
                config=config,
                transformer_layer_spec=layers,
                vocab_size=shape.vocab,
                max_sequence_length=shape.max_positions,
                position_embedding_type="none",  # PackedAttention applies the rotary embedding
                share_embeddings_and_output_weights=shape.tied,
            )
        compat.RouterReplay.clear_global_router_replay_instances()
        self.shape = shape
        self.config = config
        self.gpt = model.to(device=compat.device(), dtype=DTYPES[dtype])
        self.half_precision = dtype == "bfloat16"
        self.module = compat.Float16Module(config, self.gpt) if self.half_precision else self.gpt
        decoder: Any = self.gpt.decoder
        self.routers: tuple[compat.RouterReplay, ...] = tuple(
            layer.mlp.router.router_replay
            for index, layer in enumerate(decoder.layers)
            if routing_replay and shape.is_sparse(index)
        )

    def forward(self, tokens: torch.Tensor, packing: PlannedSeqParams) -> torch.Tensor:
        """tokens int64[t] on the model's device -> logits [t, vocab] in the model's dtype."""
        return logits_of(self.module, tokens, packing, half=self.half_precision)


def logits_of(module: torch.nn.Module, tokens: torch.Tensor, packing: PlannedSeqParams, *, half: bool) -> torch.Tensor:
    """The same for any wrapper of the model (DistributedDataParallel passes keywords through)."""
    keywords = {"fp32_output": False} if half else {}
    with compat.quiet():  # the library's own layers call each other in ways that it deprecates, at every forward
        logits: torch.Tensor = module(tokens.unsqueeze(0), None, None, packed_seq_params=packing, **keywords)
    return logits.squeeze(0)
