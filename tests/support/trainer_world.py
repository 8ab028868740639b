"""Random models of every family as Hugging Face folders, and random samples, for tests of the training side."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np

from segue.wire.sample import ROW_DECODED, Sample

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MOE = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3_rope": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2_tied": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | MOE,
    "qwen3_moe_mixed": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    | MOE
    | {"mlp_only_layers": [0], "norm_topk_prob": False},
}


def write_model(folder: Path, family: str, **changes: object) -> Path:
    """A random model folder without transformers: shapes come from the table under test, so it is not a proof of it."""
    import torch
    from safetensors.torch import save_file

    from training.megatron.hf import parameter_map
    from training.megatron.shape import read_shape

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(BASE | CONFIGS[family] | changes))
    shape = read_shape(folder)
    generator = torch.Generator().manual_seed(11)
    rows = {"q_proj": shape.heads * shape.head_dim, "k_proj": shape.groups * shape.head_dim}
    rows |= {"v_proj": rows["k_proj"], "o_proj": shape.hidden, "down_proj": shape.hidden}
    rows |= {"embed_tokens": shape.vocab, "lm_head": shape.vocab, "q_norm": shape.head_dim, "k_norm": shape.head_dim}
    state = {}
    for entry in parameter_map(shape):
        for name in entry.names:
            part = name.split(".")[-2]
            inner = shape.moe.hidden if shape.moe and ".experts." in name else shape.ffn_hidden
            count = rows.get(part, inner if part in ("gate_proj", "up_proj") else shape.hidden)
            if part == "gate" and shape.moe:
                count = shape.moe.experts
            width = {"o_proj": rows["q_proj"], "down_proj": inner}.get(part, shape.hidden)
            size = (count,) if "norm" in part or name.endswith(".bias") else (count, width)
            value = torch.randn(size, generator=generator) * 0.2
            state[name] = value + 1 if "norm" in part else value
    save_file(state, folder / "model.safetensors")
    return folder


def make_sample(
    index: int = 0,
    *,
    length: int = 14,
    group: str = "g0",
    turns: tuple[tuple[int, int], ...] = ((4, 7), (10, 13)),
    turn_rewards: tuple[float, ...] | None = None,
    reward: float | None = None,
    version: int = 0,
    layers: int = 0,
    experts: int = 4,
    vocab: int = 64,
    temperature: float = 1.0,
) -> Sample:
    """`turns` are (start, end) of trained tokens; with `layers` the sample carries decoded routes."""
    rng = np.random.default_rng(1000 + index)
    mask, turn_index = np.zeros(length, np.uint8), np.full(length, -1, np.int32)
    for turn, (start, end) in enumerate(turns):
        mask[start:end], turn_index[start:end] = 1, turn
    spans = np.array([(start, end, version) for start, end in turns], np.int32).reshape(-1, 3)
    routes = provenance = None
    if layers:
        routes = np.argsort(rng.random((length - 1, layers, experts)), axis=-1)[..., :2].astype(np.uint8)
        provenance = np.full(length - 1, ROW_DECODED, np.uint8)
    return Sample(
        sample_id=f"s{index}",
        rollout_id=f"r{index}",
        session_id=f"x{index}",
        group_id=group,
        member=index,
        reward=float(rng.random()) if reward is None else reward,
        temperature=temperature,
        tokens=rng.integers(0, vocab, length).astype(np.int32),
        loss_mask=mask,
        logprobs=(mask * np.float32(-4.1)).astype(np.float32),
        turn_index=turn_index,
        version_spans=spans,
        turn_rewards=np.array(turn_rewards or [float(rng.random()) for _ in turns], np.float32),
        routes=routes,
        routes_provenance=provenance,
    )
