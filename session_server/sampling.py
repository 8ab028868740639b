"""What a client may ask of the sampler, and what a session makes of it.

Invariant: in a training session every token is sampled so that the trainer can replay it: at the run's temperature,
without any penalty, and either from the whole vocabulary or, if the run cuts its sampling (top-k, top-p, min-p), from a
set that is recorded with the token. A request may cut deeper than the run, never less; one that asks for anything else
is told so instead of being ignored. Evaluation and plain sessions are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.config.schema import Rollout
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
    masked: bool = False
    """Whether the set that each token was chosen from is recorded."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How far a run cuts its sampling; the defaults do not."""

    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @classmethod
    def of(cls, rollout: Rollout) -> Cuts:
        return cls(rollout.top_p, rollout.top_k, rollout.min_p)

    @property
    def any(self) -> bool:
        return self != Cuts()


def refuse_control_fields(body: Mapping[str, Any], allowed: tuple[str, ...] = ()) -> None:
    """Raise RequestError 400 for a field that only the server sets."""
    for name in CONTROL_FIELDS:
        if name in body and name not in allowed:
            raise invalid(f"'{name}' is set by the session server, not by its clients", name)


def parse_sampling(body: Mapping[str, Any], *, purpose: str, temperature: float, cuts: Cuts | None = None) -> Sampling:
    """The sampling part of a request body. cuts: the run's. Raises RequestError 400 naming the field."""
    if body.get("n") not in (None, 1):
        raise invalid("n must be 1: further answers to the same messages are further requests", "n")
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            raise invalid(f"'{name}' is not supported", name)
    given = _number(body, "temperature", temperature, 0.0, 10.0)
    trains, run = purpose == "train", cuts or Cuts()
    if trains and given != temperature:
        raise invalid(f"this session trains: its temperature is {temperature}, not {given}", "temperature")
    own = _cuts(body, run if trains else Cuts())
    least = int(_number(body, "min_tokens", 0, 0, 2**31))
    if trains:
        _check_cuts(own, run)
        if least and not run.any:
            raise invalid(
                "this session trains: 'min_tokens' bars the ends of an answer, which no record says", "min_tokens"
            )
    return Sampling(
        _max_tokens(body), given, own.top_p, own.top_k, own.min_p, least, _stops(body), _seed(body), trains and run.any
    )


def _cuts(body: Mapping[str, Any], usual: Cuts) -> Cuts:
    found = {name: _number(body, name, getattr(usual, name), *limits) for name, limits in _RANGES.items()}
    if found["top_k"] != int(found["top_k"]):
        raise invalid("'top_k' must be a whole number", "top_k")
    return Cuts(found["top_p"], int(found["top_k"]), found["min_p"])


def _check_cuts(own: Cuts, run: Cuts) -> None:
    """Raise RequestError 400 for sampling that could not be replayed: cut although the run's is not, or less."""
    if not run.any:
        for name, neutral in (("top_p", 1), ("top_k", -1), ("min_p", 0)):
            if getattr(own, name) != neutral:
                raise invalid(f"this session trains: '{name}' must be {neutral} or absent", name)
        return
    if not 1 <= own.top_k <= run.top_k:
        raise invalid(f"this session trains: 'top_k' must be 1 to {run.top_k}", "top_k")
    if own.top_p > run.top_p:
        raise invalid(f"this session trains: 'top_p' must be at most {run.top_p:g}", "top_p")
    if own.min_p < run.min_p:
        raise invalid(f"this session trains: 'min_p' must be at least {run.min_p:g}", "min_p")


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
