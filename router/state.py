"""What the router knows, folded from the log: engines with their weights, and which session is where.

Invariants: the state is a function of the events applied and nothing else. An engine is *admitted* when it is up, not
torn, not draining, and holds the admitted version; pausing does not change that, because its sessions stay where they
are. The admitted version is that of the last weight sync, or of the first engine before any sync.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.events import engine, session, turn, weights, work
from segue.events.base import Body

SERVICE = "router"
"""Name of this service: its producer, its command stream, and the `service` of its facts."""


@dataclass(slots=True)
class Engine:
    """One engine in its present incarnation. `drain`: number of the drain it is in, if any; `drained`: it is over."""

    engine_id: str
    incarnation: str
    url: str
    version: int
    up: bool = True
    torn: bool = False
    paused: bool = False
    drain: int | None = None
    drained: bool = False
    sessions: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RouterState:
    engines: dict[str, Engine] = field(default_factory=dict)
    admitted: int | None = None
    admission_open: bool = False
    assigned: dict[str, str] = field(default_factory=dict)
    """Session id to engine id."""

    def is_admitted(self, one: Engine) -> bool:
        return one.up and not one.torn and one.drain is None and one.version == self.admitted

    def place(self, session_id: str, engine_id: str) -> None:
        """The session belongs to this engine from now on."""
        self.remove(session_id)
        self.assigned[session_id] = engine_id
        self.engines[engine_id].sessions.add(session_id)

    def remove(self, session_id: str) -> None:
        engine_id = self.assigned.pop(session_id, None)
        if engine_id is not None and engine_id in self.engines:
            self.engines[engine_id].sessions.discard(session_id)

    def apply(self, body: Body) -> None:
        match body:
            case engine.EngineStarted():
                self._started(body)
            case engine.EngineLost(engine_id=engine_id, incarnation=incarnation):
                if (one := self.engines.get(engine_id)) and one.incarnation == incarnation:
                    one.up = False
            case engine.EngineTorn(engine_id=engine_id):
                self._tear(engine_id)
            case engine.EngineReadmitted(engine_id=engine_id, version=version):
                self._loaded(engine_id, version)
            case weights.WeightsSynced(version=version, engines=loaded):
                self.admitted = version
                for engine_id in loaded:
                    self._loaded(engine_id, version)
            case weights.SyncFailed(torn=torn):
                for engine_id in torn:
                    self._tear(engine_id)
            case engine.EnginePaused(engine_id=engine_id) | engine.EngineResumed(engine_id=engine_id):
                if one := self.engines.get(engine_id):
                    one.paused = isinstance(body, engine.EnginePaused)
            case engine.DrainEngine(engine_id=engine_id, drain=drain):
                # Told twice, by the command and by the log: the second time says nothing new.
                if (one := self.engines.get(engine_id)) and one.drain != drain:
                    one.drain, one.drained = drain, False
            case engine.EngineDrained(engine_id=engine_id, drain=drain):
                if (one := self.engines.get(engine_id)) and one.drain == drain:
                    one.drained = True
            case turn.TurnStarted(session_id=session_id, engine_id=engine_id):
                if engine_id in self.engines and self.assigned.get(session_id) != engine_id:
                    self.place(session_id, engine_id)
            case session.SessionFinished() | session.SessionAbandoned() | session.SessionExpired():
                self.remove(body.session_id)
            case work.AdmissionOpened(service=service) | work.AdmissionClosed(service=service):
                if service == SERVICE:
                    self.admission_open = isinstance(body, work.AdmissionOpened)

    def _started(self, body: engine.EngineStarted) -> None:
        earlier = self.engines.get(body.engine_id)
        sessions = earlier.sessions if earlier else set()
        self.engines[body.engine_id] = Engine(
            body.engine_id, body.incarnation, body.url, body.version, sessions=sessions
        )
        if self.admitted is None:
            self.admitted = body.version

    def _tear(self, engine_id: str) -> None:
        if one := self.engines.get(engine_id):
            one.torn = True

    def _loaded(self, engine_id: str, version: int) -> None:
        """The engine was loaded whole: whatever was torn or drained before is over."""
        if one := self.engines.get(engine_id):
            one.version, one.torn, one.drain = version, False, None
