"""What a run must know of its model, read from the model's own config.json, and what that contradicts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from segue.config.schema import Config
from segue.errors import ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """layers: hidden layers, dense ones included; experts, top_k: 0 for a dense model; positions: longest context, 0
    if the model does not say."""

    layers: int
    experts: int
    top_k: int
    positions: int
    vocabulary: int


def read_model_facts(path: Path) -> ModelFacts:
    """Facts of the model in folder `path`. Raises ConfigError if there is no usable config.json."""
    file = path / "config.json"
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"model.path: {file} is missing; point it to a folder in Hugging Face layout") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
    text = found.get("text_config", found) if isinstance(found, dict) else None
    if not isinstance(text, dict):
        raise ConfigError(f"model.path: {file} is not a model's configuration")

    def first(*names: str) -> int:
        return next((value for value in map(text.get, names) if isinstance(value, int)), 0)

    layers, experts = first("num_hidden_layers"), first(*_EXPERTS)
    if layers < 1:
        raise ConfigError(f"model.path: {file} does not say num_hidden_layers")
    top_k = first(*_TOP_K) if experts > 1 else 0
    return ModelFacts(
        layers, experts if experts > 1 else 0, top_k, first("max_position_embeddings"), first("vocab_size")
    )


def check_model(config: Config) -> ModelFacts:
    """Facts of the run's model, which is there by now. Raises ConfigError for options that it cannot honour."""
    facts = read_model_facts(Path(config.model.path))
    if config.r3.enabled and not (facts.experts and facts.top_k):
        raise ConfigError(
            f"r3.enabled = true, but the model at model.path = {config.model.path} has no experts to route to: "
            "set r3.enabled = false or take a mixture-of-experts model"
        )
    if config.model.route_layers > facts.layers:
        raise ConfigError(
            f"model.route_layers = {config.model.route_layers}, but the model has {facts.layers} layers: "
            "set it to -1 to read it from the model"
        )
    if facts.positions and config.engine.context_length > facts.positions:
        raise ConfigError(
            f"engine.context_length = {config.engine.context_length} is beyond the {facts.positions} positions of the "
            f"model at model.path = {config.model.path}: lower it"
        )
    return facts
