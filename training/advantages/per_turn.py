"""One advantage per turn: its own reward against the same turn of the other rollouts in the group.

Invariants: as in `group_normalised`, with (rollout, turn) in place of rollout. A sampled turn without a reward of its
own raises: falling back to the rollout's reward would silently train another objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from segue.errors import TrainerError
from segue.wire.sample import Sample
from training.advantages.group_normalised import normalise


def _turn_rewards(sample: Sample) -> dict[int, float]:
    """Reward of each turn that has a trained token in this sample."""
    rewards = {}
    for turn in np.unique(sample.turn_index[sample.loss_mask == 1]).tolist():
        if not 0 <= turn < len(sample.turn_rewards) or not np.isfinite(sample.turn_rewards[turn]):
            raise TrainerError(
                f"sample {sample.sample_id}: turn {turn} has no reward; "
                "give every turn one or use the advantage 'group_normalised'"
            )
        rewards[turn] = float(sample.turn_rewards[turn])
    return rewards


def per_turn(samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """(turn reward - mean) / (std + EPSILON) over the group's rollouts at that turn, on the turn's tokens."""
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for sample in samples:
        for turn, reward in _turn_rewards(sample).items():
            known = cells.setdefault((sample.group_id, turn), {}).setdefault(sample.rollout_id, reward)
            if known != reward:
                raise TrainerError(f"rollout {sample.rollout_id}, turn {turn} has two rewards: {known} and {reward}")
    table: dict[tuple[str, int], float] = {}
    for (_, turn), rewards in cells.items():
        ids = sorted(rewards)
        values = normalise(np.array([rewards[i] for i in ids], np.float64), divide=True)
        table.update(zip([(i, turn) for i in ids], values.tolist(), strict=True))
    result = []
    for sample in samples:
        out = np.zeros(len(sample.tokens), np.float32)
        for i in np.flatnonzero(sample.loss_mask).tolist():
            out[i] = table[sample.rollout_id, int(sample.turn_index[i])]
        result.append(out)
    return result
