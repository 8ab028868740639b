"""What this server knows of the run, folded from the log at its start and kept up by `apply` afterwards.

Pure data. Invariants: applying the same log gives the same state; of sessions only this server's own are kept, and of
those that are over only a tombstone and what a repair after a crash needs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from segue.events.base import Body
from segue.events.codec import Recorded
from segue.events.engine import EngineLost, EnginePaused, EngineResumed, EngineStarted
from segue.events.sample import RewardRecorded, SampleReady, SampleRejected
from segue.events.session import SessionAbandoned, SessionExpired, SessionFinished, SessionOpened
from segue.events.turn import TurnCommitted, TurnDiscarded, TurnFailed, TurnInterrupted, TurnResumed, TurnStarted
from segue.events.work import (
    AdmissionClosed,
    AdmissionOpened,
    OpenAdmission,
    RolloutReceived,
    RolloutReserved,
    RolloutReturned,
)
from session_server.facts import SEQUENCED
from session_server.work import Work

Ending = SessionFinished | SessionAbandoned | SessionExpired


def owner_of(session_id: str, count: int) -> int:
    """Index of the server that owns a session: the highest hash of (server, session), so that few move with `count`."""
    if count == 1:
        return 0
    return max(range(count), key=lambda index: hashlib.sha256(f"{index}|{session_id}".encode()).digest())


@dataclass(slots=True)
class SessionRecord:
    """A session as the log tells it. `outcome`: SampleReady or SampleRejected of its rollout, once there."""

    opened: SessionOpened
    opened_wall_s: float
    seq: int = 0
    opened_at: int = 0
    turns: list[tuple[TurnCommitted, float]] = field(default_factory=list)
    """With the wall time of the commit."""
    rewards: dict[str, RewardRecorded] = field(default_factory=dict)
    ending: Ending | None = None
    outcome: SampleReady | SampleRejected | None = None
    lease: RolloutReserved | None = None


@dataclass(slots=True)
class OpenRequest:
    session_id: str
    turn_id: str
    request_id: str
    engine_id: str


@dataclass(slots=True)
class ServerFold:
    service: str
    index: int
    count: int
    work: Work
    position: int = 0
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    """Own sessions, those that are over included until `settle` drops them."""
    leases: dict[str, RolloutReserved] = field(default_factory=dict)
    """By session id: reservations made by this server whose rollout has not ended."""
    requests: dict[str, OpenRequest] = field(default_factory=dict)
    """Requests of own sessions that have no closing fact."""
    openings: dict[int, OpenAdmission] = field(default_factory=dict)
    """The newest opening that was asked for, by number (older ones are dropped)."""
    closed_pause: int | None = None
    last_pause: int = 0
    """Highest pause that this service has closed for."""
    last_admission: int = 0
    resumed: set[str] = field(default_factory=set)
    """Engines resumed from the pause that holds now."""
    engine_urls: dict[str, str] = field(default_factory=dict)
    """Engines that run, by id."""
    paused_engines: set[str] = field(default_factory=set)

    def owns(self, session_id: str) -> bool:
        return owner_of(session_id, self.count) == self.index

    def apply(self, event: Recorded) -> None:
        self.position = event.position
        body = event.body
        if body is None:
            return
        self.work.apply(body)
        match body:
            case OpenAdmission() | AdmissionClosed() | AdmissionOpened():
                self._admission(body)
            case EngineStarted() | EngineLost() | EnginePaused() | EngineResumed():
                self._engine(body)
            case RolloutReserved() | RolloutReturned() | RolloutReceived():
                self._lease(body, event)
            case TurnStarted() | TurnResumed():
                if self.owns(body.session_id):
                    self.requests[body.request_id] = OpenRequest(
                        body.session_id, body.turn_id, body.request_id, body.engine_id
                    )
            case TurnInterrupted() | TurnDiscarded() | TurnFailed() | TurnCommitted():
                self.requests.pop(body.request_id, None)
            case _:
                pass
        self._session(body, event)

    def _admission(self, body: Body) -> None:
        match body:
            case OpenAdmission():
                self.openings[body.admission] = body
            case AdmissionClosed(service=self.service):
                self.closed_pause, self.last_pause = body.pause, max(self.last_pause, body.pause)
                self.resumed.clear()
                self.work.close()
            case AdmissionOpened(service=self.service):
                self.closed_pause, self.last_admission = None, max(self.last_admission, body.admission)
                self.resumed.clear()
                opening = self.openings.get(body.admission)
                if opening is not None:
                    self.work.open(opening)
                self.openings = {n: o for n, o in self.openings.items() if n > body.admission}
            case _:
                pass

    def _engine(self, body: EngineStarted | EngineLost | EnginePaused | EngineResumed) -> None:
        match body:
            case EngineStarted():
                self.engine_urls[body.engine_id] = body.url
                self.paused_engines.discard(body.engine_id)
            case EngineLost():
                self.engine_urls.pop(body.engine_id, None)
                self.resumed.discard(body.engine_id)
            case EnginePaused():
                self.paused_engines.add(body.engine_id)
            case EngineResumed():
                self.paused_engines.discard(body.engine_id)
                if body.pause == self.closed_pause:
                    self.resumed.add(body.engine_id)

    def _lease(self, body: RolloutReserved | RolloutReturned | RolloutReceived, event: Recorded) -> None:
        if isinstance(body, RolloutReserved):
            if event.id.producer == self.service:
                self.leases[body.session_id] = body
            return
        ended = [s for s, lease in self.leases.items() if lease.rollout_id == body.rollout_id]
        for session_id in ended:
            if isinstance(body, RolloutReceived) or self.leases[session_id].attempt == body.attempt:
                del self.leases[session_id]

    def _session(self, body: Body, event: Recorded) -> None:
        session_id = getattr(body, "session_id", None)
        if session_id is None:
            return
        if isinstance(body, SessionOpened):
            if self.owns(session_id) and session_id not in self.sessions:
                record = SessionRecord(
                    body, event.envelope.wall_s, opened_at=event.position, lease=self.leases.get(session_id)
                )
                self.sessions[session_id] = record
            return
        record_or_none = self.sessions.get(session_id)
        if record_or_none is None:
            return
        if isinstance(body, SEQUENCED):
            record_or_none.seq += 1
        _apply_to_session(record_or_none, body, event)


def _apply_to_session(record: SessionRecord, body: Body, event: Recorded) -> None:
    match body:
        case TurnCommitted():
            record.turns.append((body, event.envelope.wall_s))
        case RewardRecorded():
            record.rewards[body.reward_key] = body
        case SessionFinished() | SessionAbandoned() | SessionExpired():
            record.ending = body
        case SampleReady() | SampleRejected():
            record.outcome = body
        case _:
            pass
    if record.ending is not None and record.outcome is not None:
        record.turns.clear()  # nothing of them is needed any more; the log keeps them


def is_settled(record: SessionRecord, *, lease_open: bool) -> bool:
    """Whether everything that must follow the session's end stands in the log."""
    if record.ending is None or lease_open:
        return False
    return record.outcome is not None or (isinstance(record.ending, SessionExpired) and record.lease is not None)
