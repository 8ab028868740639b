"""Engines: start, pause, resume, drain, loss."""

from __future__ import annotations

from typing import Literal

from segue.events.base import Body, command, fact

PauseMode = Literal["abort", "retract", "retract_native", "in_place"]


@command("engine.pause", handler="rollout actor", key=("pause", "engine_id"), follows="EnginePaused within 30 s")
class PauseEngines(Body, frozen=True):
    """Stop the scheduler of one engine. Requests were taken off before, unless the mode leaves them in place."""

    pause: int
    engine_id: str
    mode: PauseMode


@command("engine.resume", handler="rollout actor", key=("pause", "engine_id"), follows="EngineResumed within 30 s")
class ResumeEngines(Body, frozen=True):
    pause: int
    engine_id: str
    version: int


@command("engine.drain", handler="router", key=("engine_id", "drain"), follows="EngineDrained")
class DrainEngine(Body, frozen=True):
    """Assign no new session to the engine; its sessions move when their turn ends."""

    engine_id: str
    drain: int


@fact("engine.started", emitter="rollout actor", key=("engine_id", "incarnation"), follows="EngineReadmitted or a sync")
class EngineStarted(Body, frozen=True):
    """The engine is healthy at `url` and holds the weights `version`, proved by `checksum`."""

    engine_id: str
    incarnation: str
    url: str
    kind: str
    version: int
    checksum: str
    start_s: float


@fact("engine.paused", emitter="rollout actor", key=("pause", "engine_id"))
class EnginePaused(Body, frozen=True):
    """`mode` was asked for; `realised_as` is the engine's own mode that was used."""

    pause: int
    engine_id: str
    mode: PauseMode
    realised_as: str
    took_s: float


@fact("engine.resumed", emitter="rollout actor", key=("pause", "engine_id"))
class EngineResumed(Body, frozen=True):
    pause: int
    engine_id: str
    version: int


@fact("engine.drained", emitter="router")
class EngineDrained(Body, frozen=True):
    engine_id: str
    drain: int


@fact(
    "engine.lost", emitter="rollout actor, actors.supervise", key=("engine_id", "incarnation"), follows="EngineStarted"
)
class EngineLost(Body, frozen=True):
    """The engine process is gone; its requests fail over and its sessions are assigned anew."""

    engine_id: str
    incarnation: str
    reason: str


@fact("engine.torn", emitter="trainer actor, rollout actor", follows="a full load before EngineReadmitted")
class EngineTorn(Body, frozen=True):
    """The engine holds part of an unfinished sync: it takes no traffic until it was loaded whole."""

    engine_id: str
    version: int
    reason: str


@fact("engine.readmitted", emitter="controller", key=("engine_id", "incarnation", "version"))
class EngineReadmitted(Body, frozen=True):
    """The engine's version was proved equal to the admitted one; the router may use it."""

    engine_id: str
    incarnation: str
    version: int
