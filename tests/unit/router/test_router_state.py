"""The fold: which engines are admitted, and where sessions are, as the log tells it."""

from __future__ import annotations

from router.state import RouterState
from segue.events import engine, session, turn, weights, work
from segue.events.base import Body


def started(engine_id: str, version: int = 0, incarnation: str = "a") -> engine.EngineStarted:
    return engine.EngineStarted(
        engine_id=engine_id, incarnation=incarnation, url=f"http://{engine_id}", kind="fake", version=version,
        checksum="", start_s=1.0,
    )  # fmt: skip


def synced(version: int, *engines: str) -> weights.WeightsSynced:
    return weights.WeightsSynced(
        sync=version, version=version, digest="d", engines=engines, bytes=1, took_s=0.1, proved=True
    )


def turn_started(session_id: str, engine_id: str) -> turn.TurnStarted:
    return turn.TurnStarted(
        session_id=session_id, turn_id="t", request_id=f"{session_id}-r", engine_id=engine_id, prompt_tokens=3
    )


def folded(*bodies: Body) -> RouterState:
    state = RouterState()
    for body in bodies:
        state.apply(body)
    return state


def admitted(state: RouterState) -> list[str]:
    return sorted(name for name, one in state.engines.items() if state.is_admitted(one))


def test_the_first_engine_sets_the_admitted_version() -> None:
    state = folded(started("e0", 7), started("e1", 7), started("e2", 6))
    assert state.admitted == 7
    assert admitted(state) == ["e0", "e1"]


def test_a_sync_admits_its_version_for_the_engines_it_names() -> None:
    assert admitted(folded(started("e0"), started("e1"), synced(1, "e1"))) == ["e1"]


def test_an_engine_that_restarts_with_old_weights_waits_for_readmission() -> None:
    events = [started("e0"), synced(3, "e0"), started("e0", 0, "b")]
    assert admitted(folded(*events)) == []
    ready = engine.EngineReadmitted(engine_id="e0", incarnation="b", version=3)
    assert admitted(folded(*events, ready)) == ["e0"]


def test_the_loss_of_an_earlier_incarnation_is_no_loss_of_this_one() -> None:
    late = engine.EngineLost(engine_id="e0", incarnation="a", reason="killed")
    assert admitted(folded(started("e0"), started("e0", 0, "b"), late)) == ["e0"]
    now = engine.EngineLost(engine_id="e0", incarnation="b", reason="killed")
    assert admitted(folded(started("e0"), started("e0", 0, "b"), now)) == []


def test_a_torn_engine_takes_nothing_until_it_was_loaded_whole() -> None:
    torn = engine.EngineTorn(engine_id="e0", version=1, reason="cut")
    assert admitted(folded(started("e0"), torn)) == []
    assert admitted(folded(started("e0"), torn, synced(1, "e0"))) == ["e0"]


def test_engines_that_a_failed_sync_left_torn_take_nothing() -> None:
    failed = weights.SyncFailed(sync=1, version=1, reason="cut", torn=("e1",))
    assert admitted(folded(started("e0"), started("e1"), failed)) == ["e0"]


def test_a_paused_engine_stays_admitted() -> None:
    paused = engine.EnginePaused(pause=1, engine_id="e0", mode="abort", realised_as="retract", took_s=0.1)
    state = folded(started("e0"), paused)
    assert state.engines["e0"].paused
    assert admitted(state) == ["e0"]
    state.apply(engine.EngineResumed(pause=1, engine_id="e0", version=0))
    assert not state.engines["e0"].paused


def test_a_draining_engine_is_not_admitted_until_it_was_loaded_again() -> None:
    drain = engine.DrainEngine(engine_id="e0", drain=1)
    assert admitted(folded(started("e0"), drain)) == []
    assert admitted(folded(started("e0"), drain, synced(1, "e0"))) == ["e0"]


def test_a_drain_that_is_over_is_not_begun_again_by_hearing_of_it_twice() -> None:
    """The router carries the command out before it reads it back from the log."""
    drain, done = engine.DrainEngine(engine_id="e0", drain=1), engine.EngineDrained(engine_id="e0", drain=1)
    assert folded(started("e0"), drain, done, drain).engines["e0"].drained
    again = folded(started("e0"), drain, done, engine.DrainEngine(engine_id="e0", drain=2)).engines["e0"]
    assert (again.drain, again.drained) == (2, False)


def test_affinity_survives_a_restart_of_the_router_because_turns_tell_it() -> None:
    state = folded(started("e0"), started("e1"), turn_started("s", "e0"), turn_started("s", "e1"))
    assert state.assigned == {"s": "e1"}
    assert (state.engines["e0"].sessions, state.engines["e1"].sessions) == (set(), {"s"})


def test_a_session_that_ended_is_forgotten() -> None:
    for end in (
        session.SessionFinished(session_id="s", status="ok"),
        session.SessionAbandoned(session_id="s", reason="deleted"),
        session.SessionExpired(session_id="s", reason="lease"),
    ):
        state = folded(started("e0"), turn_started("s", "e0"), end)
        assert state.assigned == {}
        assert state.engines["e0"].sessions == set()


def test_a_restarted_engine_keeps_its_sessions() -> None:
    state = folded(started("e0"), turn_started("s", "e0"), started("e0", 0, "b"))
    assert state.engines["e0"].sessions == {"s"}


def test_admission_is_as_the_router_itself_said_last() -> None:
    others = work.AdmissionOpened(admission=1, service="session-0")
    assert not folded(others).admission_open
    opened = work.AdmissionOpened(admission=1, service="router")
    assert folded(opened).admission_open
    assert not folded(opened, work.AdmissionClosed(pause=1, service="router")).admission_open
