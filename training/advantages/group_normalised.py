"""One advantage per rollout: its reward against the rewards of its group (GRPO; without the division, Dr. GRPO).

Invariants:
- A rollout counts once in its group, however many samples (leaves) it was cut into.
- Mean and deviation are over the group's rollouts in float64; the result does not depend on the order of the samples.
- A group without variance, or of one rollout, gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from segue.errors import TrainerError
from segue.wire.sample import Sample

EPSILON = 1e-6
"""Added to the deviation, so that a nearly unanimous group is not blown up without bound."""


def normalise(values: NDArray[np.float64], *, divide: bool) -> NDArray[np.float64]:
    """values - mean, divided by (deviation + EPSILON) if `divide`; exact zeros if all values are equal."""
    if values.size == 0 or np.all(values == values[0]):
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / (values.std() + EPSILON) if divide else centred


def _rollout_advantages(samples: Sequence[Sample], *, divide: bool) -> list[NDArray[np.float32]]:
    groups: dict[str, dict[str, float]] = {}
    for sample in samples:
        if not np.isfinite(sample.reward):
            raise TrainerError(f"sample {sample.sample_id}: reward is {sample.reward}")
        known = groups.setdefault(sample.group_id, {}).setdefault(sample.rollout_id, sample.reward)
        if known != sample.reward:
            raise TrainerError(f"rollout {sample.rollout_id} has two rewards: {known} and {sample.reward}")
    table: dict[str, float] = {}
    for rewards in groups.values():
        ids = sorted(rewards)
        values = normalise(np.array([rewards[i] for i in ids], np.float64), divide=divide)
        table.update(zip(ids, values.tolist(), strict=True))
    return [(sample.loss_mask * np.float32(table[sample.rollout_id])).astype(np.float32) for sample in samples]


def group_normalised(samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """(reward - mean) / (std + EPSILON) of the rollout, on every token with loss_mask 1."""
    return _rollout_advantages(samples, divide=True)


def group_centred(samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """reward - mean of the rollout: no division, so easy and hard groups keep their own scale."""
    return _rollout_advantages(samples, divide=False)
