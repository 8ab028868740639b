"""Random models that any machine can make in a second and serve in a minute; written without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

TINY_LAYERS, TINY_TOP_K, TINY_EXPERTS = 4, 2, 8
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MOE_FFN = 64, 4, 2, 16, 64


def make_tiny_moe(folder: Path, *, vocab_size: int = 64, seed: int = 0) -> Path:
    """Write a Qwen3-MoE (float32, 4 layers, 8 experts, top-2) whose tokens are the words <0>, <1> ...; <1> is eos."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": TINY_LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "num_experts": TINY_EXPERTS,
        "num_experts_per_tok": TINY_TOP_K,
        "moe_intermediate_size": _MOE_FFN,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    random = np.random.default_rng(seed)
    # The usual 0.02 would make every next token equally likely.
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else random.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in _shapes(vocab_size)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<0>", "eos_token": "<1>", "pad_token": "<0>"}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def _shapes(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocab_size, _HIDDEN)
    for layer in range(TINY_LAYERS):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", (_HIDDEN,)
        yield f"{block}.self_attn.q_proj.weight", (_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{block}.self_attn.k_proj.weight", (_KV_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{block}.self_attn.v_proj.weight", (_KV_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{block}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD_DIM)
        yield f"{block}.self_attn.q_norm.weight", (_HEAD_DIM,)
        yield f"{block}.self_attn.k_norm.weight", (_HEAD_DIM,)
        yield f"{block}.post_attention_layernorm.weight", (_HIDDEN,)
        yield f"{block}.mlp.gate.weight", (TINY_EXPERTS, _HIDDEN)
        for expert in range(TINY_EXPERTS):
            yield f"{block}.mlp.experts.{expert}.gate_proj.weight", (_MOE_FFN, _HIDDEN)
            yield f"{block}.mlp.experts.{expert}.up_proj.weight", (_MOE_FFN, _HIDDEN)
            yield f"{block}.mlp.experts.{expert}.down_proj.weight", (_HIDDEN, _MOE_FFN)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (vocab_size, _HIDDEN)
