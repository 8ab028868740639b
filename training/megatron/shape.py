"""What a Hugging Face config.json says about a model, checked and reduced to what segue builds. Torch-free.

Families: Llama, Qwen2, Qwen3, Qwen3-MoE. A key that would change the mathematics and is not handled raises; nothing
is ignored silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.errors import ConfigError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts of the sparse layers; `layers` are the 0-based indices of the layers that have them."""

    experts: int
    top_k: int
    hidden: int
    renormalise: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a causal language model; `rope_llama3` = (factor, low, high, original length) or None."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    groups: int
    head_dim: int
    ffn_hidden: int
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_llama3: tuple[float, float, float, int] | None
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    moe: MoeShape | None

    def is_sparse(self, layer: int) -> bool:
        """True if the 0-based layer has experts."""
        return self.moe is not None and layer in self.moe.layers


def read_shape(folder: Path) -> ModelShape:
    """Read `folder`/config.json; raises ConfigError naming the key that cannot be honoured."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    architecture = (config.get("architectures") or ["?"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(f"{path}: architecture {architecture!r} is not one of {sorted(FAMILIES)}")
    _refuse_unhandled(path, config, family)
    try:
        return _shape(path, config, family)
    except KeyError as error:
        raise ConfigError(f"{path}: key {error} is missing") from error


def _shape(path: Path, config: dict[str, Any], family: str) -> ModelShape:
    theta, llama3 = _rope(path, config)
    heads = config["num_attention_heads"]
    return ModelShape(
        family=family,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_hidden=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        rope_theta=theta,
        rope_llama3=llama3,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        tied=bool(config.get("tie_word_embeddings", False)),
        moe=_moe(config) if family == "qwen3_moe" else None,
    )


def _refuse_unhandled(path: Path, config: dict[str, Any], family: str) -> None:
    refused = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "attention_dropout": bool(config.get("attention_dropout")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": bool(config.get("quantization_config")),
    }
    for key, wrong in refused.items():
        if wrong:
            raise ConfigError(f"{path}: {key} = {config[key]!r} is not supported for family {family}")


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, tuple[float, float, float, int] | None]:
    """transformers 5 writes rope_parameters, older files rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {})}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, original = (rope[name] for name in names)
        return theta, (float(factor), float(low), float(high), int(original))
    raise ConfigError(f"{path}: rope type {kind!r} is not one of ['default', 'llama3']")


def _moe(config: dict[str, Any]) -> MoeShape:
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    layers = tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    return MoeShape(
        experts=config.get("num_experts") or config["num_local_experts"],  # transformers 5 writes the latter
        top_k=config["num_experts_per_tok"],
        hidden=config["moe_intermediate_size"],
        renormalise=bool(config.get("norm_topk_prob", False)),
        layers=layers,
    )
