"""Sampling masks: which token ids each sampled token was chosen from, held as CSR.

Top-k, top-p and min-p sampling renormalise over the ids they keep. A trainer that normalises over the full vocabulary
compares two different distributions, so the kept set is a fact of each sampled token, like its log-prob.

Invariants of a mask of n tokens: `offsets` starts at 0, ends at len(ids) and is strictly increasing (no token was
chosen from nothing); the ids of a token are strictly ascending and none is negative; both arrays are copied at
construction and read-only; two masks are equal only if they are the same object. A token that nobody sampled (a tool's
output, a template's text) has itself as its only choice, which makes its renormalised log-prob exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from segue.errors import CodecError


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """ids: int32[total], the kept ids of one token after another; offsets: int64[n + 1]; token t was chosen from
    `ids[offsets[t]:offsets[t + 1]]`. Raises CodecError naming the first token that breaks an invariant."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype in (("ids", np.int32), ("offsets", np.int64)):
            given = getattr(self, name)
            if given.dtype != np.dtype(dtype) or given.ndim != 1:
                raise CodecError(
                    f"sampling mask: {name} is {given.dtype}{list(given.shape)}, expected {dtype.__name__}[]"
                )
            own = given.copy()
            own.flags.writeable = False
            object.__setattr__(self, name, own)
        _check(self.ids, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]]) -> SamplingMask:
        """From the kept ids of each token, in any order. Raises CodecError for an empty or repeating set."""
        offsets = np.zeros(len(kept) + 1, np.int64)
        np.cumsum([len(ids) for ids in kept], out=offsets[1:])
        flat = np.fromiter((token for ids in kept for token in sorted(ids)), np.int32, int(offsets[-1]))
        return cls(flat, offsets)

    @classmethod
    def forced(cls, tokens: NDArray[np.int32]) -> SamplingMask:
        """Of tokens that nobody sampled: each is its own only choice."""
        return cls(tokens, np.arange(len(tokens) + 1, dtype=np.int64))

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """One after another; of none, the mask of no token."""
        shifts = np.cumsum([0, *(len(mask.ids) for mask in masks)])
        ends = [mask.offsets[1:] + shift for mask, shift in zip(masks, shifts, strict=False)]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(mask.ids for mask in masks)]),
            np.concatenate([np.zeros(1, np.int64), *ends]),
        )

    def cut(self, start: int, end: int) -> SamplingMask:
        """That of tokens [start, end). Raises CodecError beyond what is there."""
        if not 0 <= start <= end <= len(self):
            raise CodecError(f"sampling mask: tokens {start} to {end} are not all there: it has {len(self)}")
        first, last = int(self.offsets[start]), int(self.offsets[end])
        return SamplingMask(self.ids[first:last], self.offsets[start : end + 1] - first)

    def support(self, token: int) -> NDArray[np.int32]:
        """int32[k], ascending: what token number `token` was chosen from."""
        return self.ids[self.offsets[token] : self.offsets[token + 1]]

    def check(self, tokens: NDArray[np.int32]) -> None:
        """Raise CodecError, naming the token, unless this is a mask of just these tokens, each within its own set."""
        if len(tokens) != len(self):
            raise CodecError(f"sampling mask of {len(self)} tokens for {len(tokens)}: token {len(self)} differs")
        if len(tokens) == 0:
            return
        hits = self.ids == np.repeat(tokens, np.diff(self.offsets))
        missing = np.add.reduceat(hits, self.offsets[:-1], dtype=np.int64) == 0
        if missing.any():
            at = int(missing.argmax())
            raise CodecError(f"sampling mask: token {at} ({int(tokens[at])}) is not in the set it was chosen from")


def _check(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise CodecError(f"sampling mask: offsets must run from 0 to {len(ids)}")
    sizes = np.diff(offsets)
    if (sizes <= 0).any():
        raise CodecError(f"sampling mask: token {int((sizes <= 0).argmax())} was chosen from nothing")
    if len(ids) == 0:
        return
    wrong = np.diff(ids) <= 0
    wrong[offsets[1:-1] - 1] = False  # from one token's last id to the next one's first
    if wrong.any() or ids[offsets[:-1]].min() < 0:
        at = int(wrong.argmax()) if wrong.any() else int(offsets[:-1][ids[offsets[:-1]].argmin()])
        token = int(np.searchsorted(offsets, at, side="right")) - 1
        raise CodecError(f"sampling mask: the ids of token {token} are not ascending from 0 on")
