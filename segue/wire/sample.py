"""The training sample: one rollout's tokens with everything the trainer needs, as plain numpy arrays.

Invariants: all per-token arrays have the same length n; a token with `loss_mask == 0` has `logprobs == 0.0` and
`turn_index == -1`; every token with `loss_mask == 1` lies in exactly one version span; `routes` has n - 1 rows,
because the last token was never fed to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROW_DECODED, ROW_RECOMPUTED, ROW_ABSENT = 0, 1, 2
"""Provenance of a route row: recorded when its token was fed, re-made by a later prefill, or not there at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One leaf of a finished session.

    tokens: int32[n]; loss_mask: uint8[n] (1: sampled by the policy and trains); logprobs: float32[n], natural log,
    at `temperature`, as the engine reported them; turn_index: int32[n], the turn a sampled token belongs to, else -1;
    version_spans: int32[k, 3] rows (start, end, weight version), ascending, half-open; turn_rewards: float32[turns],
    NaN where a turn has no reward of its own; reward: scalar of the whole rollout.
    routes: uint8 or uint16 [n - 1, layers, top_k] or None; routes_provenance: uint8[n - 1] of ROW_* or None.
    """

    sample_id: str
    rollout_id: str
    session_id: str
    group_id: str
    member: int
    reward: float
    temperature: float
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    turn_index: NDArray[np.int32]
    version_spans: NDArray[np.int32]
    turn_rewards: NDArray[np.float32]
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    routes_provenance: NDArray[np.uint8] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
