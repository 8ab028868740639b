"""How far the trainer's log-probs lie from the engine's, measured before the first update of a step. Numpy only.

Three kinds of tokens, told apart because they measure three things:
- own: sampled by the step's own weights on a context that these weights sampled too. What differs is the numerical
  mismatch of two programs, and zero would be perfect.
- carried: sampled by the step's own weights, but after tokens of older ones (a conversation that went on over a weight
  sync). Each token's route is recorded once, when it was first fed; the engine's re-made cache of that context chose
  new routes under the new weights. With replay that difference adds to the mismatch.
- older: sampled by older weights. The policy's own movement adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.packing import Pack


@dataclass(slots=True)
class BatchScore:
    """Collects, over the packs of a batch, each token's absolute difference, the version that sampled it, and the
    oldest version that sampled it or a token before it in its sample."""

    diffs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[NDArray[np.int32]] = field(default_factory=list)
    oldest: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, pack: Pack, logprobs: NDArray[np.float32]) -> None:
        """`logprobs` float32[p]: the trainer's own, in the pack's order. Tokens out of the loss are left out here."""
        self.diffs.append(np.abs(logprobs - pack.behaviour)[pack.mask])
        self.versions.append(pack.versions[pack.mask])
        oldest = np.empty_like(pack.versions)
        for datum in np.unique(pack.datum):
            at = pack.datum == datum
            oldest[at] = np.minimum.accumulate(pack.versions[at])
        self.oldest.append(oldest[pack.mask])


def score_metrics(score: BatchScore, version: int) -> dict[str, float]:
    """Means and counts of the three kinds, and the maximum of the tokens of `version` on their own context. 0 where
    there is no token."""
    diffs, versions = np.concatenate(score.diffs), np.concatenate(score.versions)
    current = versions == version
    own = current & (np.concatenate(score.oldest) == version)
    metrics = {"logprob_abs_diff_max": float(diffs[own].max()) if own.any() else 0.0}
    for suffix, chosen in (("", own), ("_carried", current & ~own), ("_older", ~current)):
        metrics[f"logprob_abs_diff_mean{suffix}"] = float(diffs[chosen].mean()) if chosen.any() else 0.0
        metrics[f"logprob_abs_diff_tokens{suffix}"] = float(chosen.sum())
    return metrics
