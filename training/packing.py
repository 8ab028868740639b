"""Samples into micro-batches of at most a token budget, without padding. Numpy only.

Invariants:
- Every sample is in exactly one micro-batch, whole; a micro-batch exceeds the budget only if it is one sample that is
  longer by itself.
- Within a micro-batch samples are ordered by length, so that attention's blocks carry little padding.
- The plan is a function of the lengths alone: the same batch packs the same way every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from segue.errors import ConfigError, TrainerError
from segue.wire.mask import SamplingMask
from segue.wire.sample import Sample


def plan_packs(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of each micro-batch: best fit over descending lengths, the classic bound of 11/9 of the optimum."""
    if budget < 1:
        raise ConfigError(f"micro_batch_tokens must be at least 1, not {budget}")
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [i for i, free in enumerate(room) if free >= lengths[index]]
        if fits:
            best = min(fits, key=lambda i: room[i])
            packs[best].append(index)
            room[best] -= lengths[index]
        else:
            packs.append([index])
            room.append(budget - lengths[index])
    return packs


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch. Per token, concatenated: `tokens` int64[t]. Per *prediction* (a supervised token, scored from
    the position before it), all [p]: `positions` int64 (row of the logits), `targets` int64, `behaviour` float32,
    `advantages` float32, `temperatures` float32, `versions` int32 (weights that sampled it), `datum` int64 (index into
    `samples`), `mask` bool (False where replay took the token out of the loss). `kept`: what each target was chosen
    from, None where no sample says."""

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    versions: NDArray[np.int32]
    datum: NDArray[np.int64]
    mask: NDArray[np.bool_]
    kept: SamplingMask | None = None


def token_versions(sample: Sample) -> NDArray[np.int32]:
    """Weight version of every token, -1 where none is recorded; int32[n]."""
    versions = np.full(len(sample.tokens), -1, np.int32)
    for start, end, version in sample.version_spans.tolist():
        versions[start:end] = version
    return versions


def build_pack(
    samples: Sequence[Sample],
    advantages: Sequence[NDArray[np.float32]],
    kept: Sequence[NDArray[np.bool_]],
    members: Sequence[int],
) -> Pack:
    """Concatenate the samples `members`; `kept` bool[n] per sample says which supervised tokens stay in the loss."""
    parts = []
    base = 0
    for datum, index in enumerate(members):
        sample = samples[index]
        at = np.flatnonzero(sample.loss_mask)
        if len(at) and at[0] == 0:
            raise TrainerError(f"sample {sample.sample_id}: its first token trains, but nothing predicts it")
        parts.append(
            (
                at - 1 + base,
                sample.tokens[at],
                sample.logprobs[at],
                advantages[index][at],
                np.full(len(at), sample.temperature, np.float32),
                token_versions(sample)[at],
                np.full(len(at), datum, np.int64),
                kept[index][at],
            )
        )
        base += len(sample.tokens)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Pack(
        samples=tuple(members),
        lengths=tuple(len(samples[i].tokens) for i in members),
        tokens=np.concatenate([samples[i].tokens for i in members]).astype(np.int64),
        positions=columns[0].astype(np.int64),
        targets=columns[1].astype(np.int64),
        behaviour=columns[2].astype(np.float32),
        advantages=columns[3],
        temperatures=columns[4],
        versions=columns[5],
        datum=columns[6],
        mask=columns[7],
        kept=_kept_sets(samples, members),
    )


def _kept_sets(samples: Sequence[Sample], members: Sequence[int]) -> SamplingMask | None:
    """Of the supervised tokens, one sample after another. Raises TrainerError if only some samples have them: the
    batch would mix two kinds of log-probs."""
    if all(sample.mask is None for sample in samples):
        return None
    parts = []
    for sample in (samples[i] for i in members):
        if sample.mask is None:
            raise TrainerError(f"sample {sample.sample_id} has no sampling mask, others of its batch have")
        at, sizes = sample.loss_mask == 1, np.diff(sample.mask.offsets)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[at])])
        parts.append(SamplingMask(sample.mask.ids[np.repeat(at, sizes)], offsets))
    return SamplingMask.join(parts)
