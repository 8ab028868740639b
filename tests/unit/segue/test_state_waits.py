"""Who waits for whom: each wait begins and ends with the events that say so."""

from __future__ import annotations

from scripted_world import World, small_config

from segue.events import engine, run, session, step, turn, work
from segue.events.base import Body
from segue.state.waits import Wait, Waits


def waits_of(world: World, now_wall_s: float = 0.0) -> dict[tuple[str, str, str], Wait]:
    waits = Waits()
    for event in world.log:
        waits.apply(event)
    return {(w.waiter, w.on, w.what): w for w in waits.waits(now_wall_s)}


def stuck_at(kind: type[Body]) -> World:
    world = World(small_config())
    world.boot()
    world.on_command = lambda body: not isinstance(body, kind)
    world.pump()
    return world


def test_a_command_without_its_answer_is_a_wait_of_the_controller() -> None:
    world = stuck_at(step.TrainStep)
    command = next(e for e in world.log if isinstance(e.body, step.TrainStep))
    found = waits_of(world, command.envelope.wall_s + 90.0)
    assert found["controller", "trainer", "step.train"].for_s == 90.0
    assert found["engine-0", "controller", "the end of pause 1"].count == 1
    world.append(step.StepFinished(1, 1, 1, "d", {}, 0.0, 0.0))
    assert ("controller", "trainer", "step.train") not in waits_of(world)


def test_turns_wait_for_their_engine_then_for_a_resume_and_sessions_for_their_environment() -> None:
    world = World(small_config())
    world.boot()
    world.append(session.SessionOpened("s1", "d", "train-0-0", 0, 0, 1, "train", 1.0, 60.0, 100))
    assert waits_of(world)["sessions", "environment", "its next request"].count == 1
    world.append(turn.TurnStarted("s1", "t1", "r1", "engine-0", 4), "session-0")
    assert waits_of(world)["turns", "engine-0", "an answer"].count == 1
    assert ("sessions", "environment", "its next request") not in waits_of(world)
    world.append(turn.TurnInterrupted("s1", "t1", "r1", "engine-0", 3, None, "x"), "session-0")
    assert waits_of(world)["turns", "engines", "a resume"].count == 1
    world.append(turn.TurnResumed("s1", "t1", "r2", "engine-1", 3), "session-0")
    assert set(waits_of(world)) == {("turns", "engine-1", "an answer")}
    world.append(turn.TurnFailed("s1", "t1", "r2", 504, "late"), "session-0")
    world.append(session.SessionExpired("s1", "deadline"), "session-0")
    assert waits_of(world) == {}


def test_a_lost_engine_is_waited_for_until_it_is_back() -> None:
    world = World(small_config())
    world.boot()
    world.append(engine.EngineLost("engine-1", "i1", "killed"))
    assert waits_of(world)["router", "engine-1", "its return"].count == 1
    world.append(engine.EngineStarted("engine-1", "i2", "http://new", "fake", 0, "c", 0.1))
    assert waits_of(world) == {}


def test_groups_wait_for_their_members_and_nobody_waits_once_the_run_stopped() -> None:
    world = World(small_config())
    world.boot()
    world.append(work.RolloutReserved("train-0-0", 0, "s1", "train", 0, 0, 1, 100.0))
    world.append(work.RolloutReserved("train-1-0", 0, "s2", "train", 1, 0, 1, 100.0))
    assert waits_of(world)["controller", "sessions", "train groups to be whole"].count == 2
    world.append(work.GroupDropped("train", 0, "failed"))
    assert waits_of(world)["controller", "sessions", "train groups to be whole"].count == 1
    world.append(run.RunStopped("failed", "enough"))
    assert waits_of(world) == {}
