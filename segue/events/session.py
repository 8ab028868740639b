"""A session: one conversation of one environment with the policy."""

from __future__ import annotations

import msgspec

from segue.events.base import Body, fact


@fact("session.opened", emitter="session server", key=("session_id",), identity=("token_digest",))
class SessionOpened(Body, frozen=True):
    """A session exists. `token_digest` is the sha256 of its bearer token; the token itself is never recorded."""

    session_id: str
    token_digest: str
    rollout_id: str
    group: int
    member: int
    seed: int
    purpose: str
    temperature: float
    ttl_s: float
    token_budget: int
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


@fact("session.finished", emitter="session server", key=("session_id",), follows="SampleReady or SampleRejected")
class SessionFinished(Body, frozen=True):
    """The environment is done with it. `status`: what the environment said (ok | failed | truncated ...)."""

    session_id: str
    status: str
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


@fact("session.abandoned", emitter="session server", key=("session_id",))
class SessionAbandoned(Body, frozen=True):
    """Deleted by its client: no sample, its group member fails."""

    session_id: str
    reason: str


@fact("session.expired", emitter="session server", key=("session_id",))
class SessionExpired(Body, frozen=True):
    """Its lease or time to live passed without a finish."""

    session_id: str
    reason: str
