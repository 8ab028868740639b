"""How far the trainer's log-probs lie from the engine's, measured before the first update of a step. Numpy only.

Tokens sampled by the step's own weights show the two programs' numerical mismatch alone (zero would be perfect);
tokens of older weights add the policy's own movement and are reported apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.packing import Pack


@dataclass(slots=True)
class BatchScore:
    """Collects, over the packs of a batch, the absolute differences and the version that sampled each token."""

    diffs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, pack: Pack, logprobs: NDArray[np.float32]) -> None:
        """`logprobs` float32[p]: the trainer's own, in the pack's order. Tokens out of the loss are left out here."""
        self.diffs.append(np.abs(logprobs - pack.behaviour)[pack.mask])
        self.versions.append(pack.versions[pack.mask])


def score_metrics(score: BatchScore, version: int) -> dict[str, float]:
    """Mean, maximum and count over tokens of `version`; mean and count over the rest. 0 where there is no token."""
    diffs = np.concatenate(score.diffs)
    own = np.concatenate(score.versions) == version
    return {
        "logprob_abs_diff_mean": float(diffs[own].mean()) if own.any() else 0.0,
        "logprob_abs_diff_max": float(diffs[own].max()) if own.any() else 0.0,
        "logprob_abs_diff_tokens": float(own.sum()),
        "logprob_abs_diff_mean_older": float(diffs[~own].mean()) if (~own).any() else 0.0,
        "logprob_abs_diff_tokens_older": float((~own).sum()),
    }
