"""Rewards and training samples."""

from __future__ import annotations

from segue.events.base import Body, Bulk, fact


@fact("sample.reward_recorded", emitter="session server", key=("session_id", "reward_key"), identity=("value", "turn"))
class RewardRecorded(Body, frozen=True):
    """A reward from the environment: of the whole rollout (`turn` = -1) or of one turn, counted from 0."""

    session_id: str
    reward_key: str
    value: float
    turn: int = -1


@fact(
    "sample.ready",
    emitter="session server",
    key=("rollout_id",),
    identity=("frame_digest",),
    follows="GroupCompleted or GroupDropped of its group",
)
class SampleReady(Body, frozen=True):
    """The rollout's sample frame is stored. `frame_digest` is that of the frame's bytes."""

    sample_id: str
    rollout_id: str
    session_id: str
    purpose: str
    group: int
    member: int
    reward: float
    tokens: int
    trained_tokens: int
    turns: int
    partial_turns: int
    oldest_version: int
    newest_version: int
    frame: Bulk
    frame_digest: str


@fact("sample.rejected", emitter="session server", key=("rollout_id",), identity=())
class SampleRejected(Body, frozen=True):
    """The session ended without a usable sample; its group member fails."""

    rollout_id: str
    session_id: str
    purpose: str
    group: int
    member: int
    reason: str


@fact("sample.rescored", emitter="segue rescore")
class Rescored(Body, frozen=True):
    """A recorded sample was run through an engine or trainer again, off line, to compare log-probs and routes."""

    sample_id: str
    by: str
    version: int
    result: Bulk
