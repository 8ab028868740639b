"""The fake engine's "model": tokens, log-probs, routes and kept sets as pure functions that a test can recompute.

Invariants: the next token depends on the whole context (and on `sampling_seed`, if given), never on where the prompt
ends, so a turn carried on from prompt + partial goes on exactly as it would have; a log-prob and a route row depend on
(token, position, weight version) alone, so every stitched row can be checked and its version read off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_STEP, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(state: int, value: int) -> int:
    """One step of a 64-bit hash (SplitMix64's finaliser) over a sequence of integers."""
    z = (state + (value + 1) * _STEP) & _WORD
    z = ((z ^ (z >> 30)) * _MIX1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX2) & _WORD
    return z ^ (z >> 31)


def unit(word: int) -> float:
    """A 64-bit hash as a number in [0, 1)."""
    return (word >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """Sizes and habits. `eos_p`: chance that a token is `eos_id`, which otherwise never comes up."""

    vocab_size: int = 320
    layers: int = 4
    top_k: int = 2
    experts: int = 8
    eos_id: int = 1
    eos_p: float = 0.02
    seed: int = 0

    def state_of(self, tokens: Sequence[int]) -> int:
        """Hash of a context; `mix(state, token)` is the hash of the context with one more token."""
        state = self.seed
        for token in tokens:
            state = mix(state, token)
        return state

    def next_token(self, state: int, *, may_end: bool = True, salt: int = 0) -> int:
        """The token that follows a context with hash `state`; `may_end` False bars eos."""
        word = mix(state, salt)
        if may_end and unit(mix(word, 1)) < self.eos_p:
            return self.eos_id
        token = word % (self.vocab_size - 1)
        return token if token < self.eos_id else token + 1

    def kept(self, token: int, state: int, top_k: int) -> list[int]:
        """`top_k` (1 to vocab_size) distinct ids with the sampled one among them, in no order."""
        shift = mix(state, 2) % top_k
        return [(token - shift + i) % self.vocab_size for i in range(top_k)]

    def logprob(self, token: int, position: int, version: int) -> float:
        """Log-prob of the token at absolute `position` under weights `version`, in (-4, 0)."""
        return -4.0 * unit(mix(mix(mix(3, token), position), version)) - 1e-3

    def rows(self, tokens: Sequence[int], positions: Sequence[int], versions: Sequence[int]) -> NDArray[np.int32]:
        """int32[n, layers, top_k]: experts of each fed token, distinct within a row."""
        base = np.empty((len(tokens), self.layers, 1), np.int64)
        for i, (token, position, version) in enumerate(zip(tokens, positions, versions, strict=True)):
            state = mix(mix(mix(4, token), position), version)
            base[i, :, 0] = [mix(state, layer) % self.experts for layer in range(self.layers)]
        return ((base + np.arange(self.top_k)) % self.experts).astype(np.int32)


def model_of(folder: Path, **given: float | None) -> FakeModel:
    """A FakeModel with the sizes of a model folder's config.json, if there is one; what is `given` wins."""
    sizes: dict[str, object] = {}
    file = folder / "config.json"
    if file.is_file():
        config = json.loads(file.read_bytes())
        names = {
            "vocab_size": ("vocab_size",),
            "layers": ("num_hidden_layers",),
            "top_k": ("num_experts_per_tok",),
            "experts": ("num_experts", "num_local_experts"),
            "eos_id": ("eos_token_id",),
        }
        for field, keys in names.items():
            found = [config[key] for key in keys if isinstance(config.get(key), int)]
            sizes |= {field: found[0]} if found else {}
    return FakeModel(**(sizes | {key: value for key, value in given.items() if value is not None}))  # type: ignore[arg-type]
