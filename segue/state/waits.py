"""Who waits for whom, for what and since when: a fold of the log, for people who ask why nothing happens.

Each wait is an edge of a graph; `waits(now)` gives them longest first. What several wait for in the same way (turns at
one engine, say) is one edge with a count and the time of the oldest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from segue.events import engine, run, session, step, turn, weights, work
from segue.events.base import Body
from segue.events.codec import Recorded
from segue.state.answers import ANSWERING, ANSWERS, about_of

_OPENINGS = (turn.TurnStarted, turn.TurnResumed)
_CLOSINGS = (turn.TurnCommitted, turn.TurnInterrupted, turn.TurnDiscarded, turn.TurnFailed)
_ENDINGS = (session.SessionFinished, session.SessionAbandoned, session.SessionExpired)


class Wait(msgspec.Struct, frozen=True):
    """`waiter` needs `what` from `on`; `count` such waits, the oldest since `since_wall_s`, `for_s` seconds ago."""

    waiter: str
    on: str
    what: str
    count: int
    since_wall_s: float
    for_s: float


@dataclass(slots=True)
class _Open:
    on: str
    what: str
    since_wall_s: float


@dataclass(slots=True)
class Waits:
    """Apply events in log order, then ask `waits`."""

    stopped: bool = False
    _commands: dict[tuple[object, ...], _Open] = field(default_factory=dict)
    _requests: dict[str, _Open] = field(default_factory=dict)
    _held: dict[str, float] = field(default_factory=dict)
    """Turns that were cut and wait to be carried on."""
    _idle: dict[str, float] = field(default_factory=dict)
    """Open sessions without a request, since when."""
    _paused: dict[str, _Open] = field(default_factory=dict)
    _down: dict[str, float] = field(default_factory=dict)
    """Engines that were lost and are not back."""
    _groups: dict[tuple[str, int], float] = field(default_factory=dict)
    """Admitted groups that are not settled."""

    def apply(self, event: Recorded) -> None:
        body, wall_s = event.body, event.envelope.wall_s
        if body is None:
            return
        if type(body) in ANSWERS:
            self._commands[about_of(body)] = _Open(_target(body), event.envelope.type, wall_s)
        elif isinstance(body, ANSWERING):
            self._commands.pop(about_of(body), None)
        if isinstance(body, run.RunStopped | run.RunStarted | run.RunResumed):
            self.stopped = isinstance(body, run.RunStopped)
        self._turn(body, wall_s)
        self._session(body, wall_s)
        self._engine(body, wall_s)
        self._group(body, wall_s)

    def _turn(self, body: Body, wall_s: float) -> None:
        if isinstance(body, _OPENINGS):
            self._requests[body.request_id] = _Open(body.engine_id, "an answer", wall_s)
            self._held.pop(body.turn_id, None)
            self._idle.pop(body.session_id, None)
        elif isinstance(body, _CLOSINGS):
            self._requests.pop(body.request_id, None)
            self._held.pop(body.turn_id, None)
            if isinstance(body, turn.TurnInterrupted):
                self._held[body.turn_id] = wall_s
            else:
                self._idle[body.session_id] = wall_s

    def _session(self, body: Body, wall_s: float) -> None:
        if isinstance(body, session.SessionOpened):
            self._idle[body.session_id] = wall_s
        elif isinstance(body, _ENDINGS):
            self._idle.pop(body.session_id, None)

    def _engine(self, body: Body, wall_s: float) -> None:
        match body:
            case engine.EnginePaused():
                self._paused[body.engine_id] = _Open("controller", f"the end of pause {body.pause}", wall_s)
            case engine.EngineResumed():
                self._paused.pop(body.engine_id, None)
            case engine.EngineLost():
                self._down[body.engine_id] = wall_s
                self._paused.pop(body.engine_id, None)
            case engine.EngineStarted():
                self._down.pop(body.engine_id, None)
            case _:
                pass

    def _group(self, body: Body, wall_s: float) -> None:
        match body:
            case work.RolloutReserved():
                self._groups.setdefault((body.purpose, body.group), wall_s)
            case work.GroupCompleted() | work.GroupDropped():
                self._groups.pop((body.purpose, body.group), None)
            case _:
                pass

    def waits(self, now_wall_s: float) -> list[Wait]:
        """Every wait of now, the longest first; none once the run has stopped."""
        if self.stopped:
            return []
        edges: dict[tuple[str, str, str], list[float]] = {}

        def add(waiter: str, on: str, what: str, since_wall_s: float) -> None:
            edges.setdefault((waiter, on, what), []).append(since_wall_s)

        for one in self._commands.values():
            add("controller", one.on, one.what, one.since_wall_s)
        for one in self._requests.values():
            add("turns", one.on, one.what, one.since_wall_s)
        for since in self._held.values():
            add("turns", "engines", "a resume", since)
        for since in self._idle.values():
            add("sessions", "environment", "its next request", since)
        for name, one in self._paused.items():
            add(name, one.on, one.what, one.since_wall_s)
        for name, since in self._down.items():
            add("router", name, "its return", since)
        for (purpose, _), since in self._groups.items():
            add("controller", "sessions", f"{purpose} groups to be whole", since)
        found = [
            Wait(waiter, on, what, len(since), min(since), max(0.0, now_wall_s - min(since)))
            for (waiter, on, what), since in edges.items()
        ]
        return sorted(found, key=lambda wait: wait.since_wall_s)


def _target(body: Body) -> str:
    match body:
        case engine.PauseEngines() | engine.ResumeEngines():
            return body.engine_id
        case step.TrainStep() | step.SaveCheckpoint() | weights.SyncWeights():
            return "trainer"
        case work.OpenAdmission() | work.CloseAdmission():
            return "session servers, router"
    return str(getattr(body, "owner", ""))


__all__ = ["Wait", "Waits"]
