"""What a client may ask of the sampler, and what a session makes of it.

Invariant: in a training session every token is sampled exactly as the trainer assumes, at the run's temperature and
without any cut or penalty; a client that asks for something else is told so instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from session_server.messages import invalid

CONTROL_FIELDS = (
    "input_ids", "input_embeds", "logprob_start_len", "return_routed_experts", "routed_experts_start_len",
    "return_sampling_mask", "lora_path", "rid", "extra_key", "custom_logit_processor", "session_params",
    "return_hidden_states", "token_ids_logprob",
)  # fmt: skip
"""Belong to the server: a client that set them would break the record of its own session."""
_NEUTRAL: Mapping[str, object] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "top_logprobs": 0,
    "response_format": {"type": "text"}, "functions": [], "function_call": "none",
}  # fmt: skip
"""Options that are not supported, with the one value that means nothing."""
_UNCUT: Mapping[str, float] = {"top_p": 1, "top_k": -1, "min_p": 0}
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """max_new_tokens: as asked, None if not. temperature: what the request will use."""

    max_new_tokens: int | None
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None


def refuse_control_fields(body: Mapping[str, Any], allowed: tuple[str, ...] = ()) -> None:
    """Raise RequestError 400 for a field that only the server sets."""
    for name in CONTROL_FIELDS:
        if name in body and name not in allowed:
            raise invalid(f"'{name}' is set by the session server, not by its clients", name)


def parse_sampling(body: Mapping[str, Any], *, purpose: str, temperature: float) -> Sampling:
    """The sampling part of a request body. Raises RequestError 400 naming the field."""
    if body.get("n") not in (None, 1):
        raise invalid("n must be 1: further answers to the same messages are further requests", "n")
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            raise invalid(f"'{name}' is not supported", name)
    given = _number(body, "temperature", temperature, 0.0, 10.0)
    cuts = {name: _number(body, name, neutral, *_RANGES[name]) for name, neutral in _UNCUT.items()}
    if purpose == "train":
        if given != temperature:
            raise invalid(f"this session trains: its temperature is {temperature}, not {given}", "temperature")
        for name, neutral in _UNCUT.items():
            if cuts[name] != neutral:
                raise invalid(f"this session trains: '{name}' must be {neutral} or absent", name)
    return Sampling(
        _max_tokens(body), given, cuts["top_p"], int(cuts["top_k"]), cuts["min_p"],
        int(_number(body, "min_tokens", 0, 0, 2**31)), _stops(body), _seed(body),
    )  # fmt: skip


_RANGES: Mapping[str, tuple[float, float]] = {"top_p": (1e-6, 1.0), "top_k": (-1, 2**31), "min_p": (0.0, 1.0)}


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"'{name}' must be a number from {low:g} to {high:g}", name)
    return float(value)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid(f"'{name}' must be a positive whole number", name)
        return value
    return None


def _seed(body: Mapping[str, Any]) -> int | None:
    value = body.get("seed")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise invalid("'seed' must be a whole number from 0 to 2147483647", "seed")
    return value


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS or any(not isinstance(s, str) for s in stops):
        raise invalid("'stop' must be a string or a list of strings", "stop")
    if "" in stops:
        raise invalid(f"'stop' must be a string or a list of at most {MAX_STOPS} strings, none empty", "stop")
    return tuple(stops)
