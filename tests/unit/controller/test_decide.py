"""The decisions of the synchronous loop over a scripted world: order, completeness, restarts, failures."""

from __future__ import annotations

import pytest
from scripted_world import World, small_config

from controller.decide import decide
from segue.events import engine, run, sample, step, turn, weights, work
from segue.events.base import Body
from segue.state import RunState


def played(**rollout: object) -> World:
    world = World(small_config(**rollout))
    world.boot()
    world.pump()
    return world


def test_nothing_is_decided_before_every_part_is_up() -> None:
    world = World(small_config())
    assert decide(world.state) == ()
    world.boot()
    assert decide(world.state) != ()


def test_a_run_evaluates_trains_every_step_and_completes() -> None:
    world = played()
    assert world.state.stopped == "completed"
    assert [b.step for b in world.bodies(step.StepFinished)] == [1, 2, 3]
    assert [b.step for b in world.bodies(step.EvaluationFinished)] == [0, 3]
    assert [b.step for b in world.bodies(step.CheckpointCommitted)] == [2, 3]
    assert world.names()[-1] == "run.stopped"


def test_one_step_keeps_the_order_of_the_saga() -> None:
    world = played()
    order = [
        "work.close_admission", "work.admission_closed", "turn.abort", "turn.interrupted", "engine.pause",
        "engine.paused", "step.train", "step.finished", "weights.sync", "weights.synced", "engine.resume",
    ]  # fmt: skip
    names = world.names()
    first = [names.index(name) for name in order]
    assert first == sorted(first)


def test_each_sample_trains_once_and_groups_train_whole() -> None:
    world = played()
    trained = [s for b in world.bodies(step.TrainStep) for s in b.sample_ids]
    assert len(trained) == len(set(trained)) == 3 * 2 * 2
    groups = [name.rsplit("-", 1)[0] for name in trained]
    assert all(groups.count(group) == 2 for group in groups)


@pytest.mark.parametrize("mode", ["in_place", "retract_native"])
def test_modes_that_leave_requests_in_the_engine_abort_nothing(mode: str) -> None:
    world = played(pause_mode=mode)
    assert world.bodies(turn.AbortTurns) == []
    assert {b.mode for b in world.bodies(engine.PauseEngines)} == {mode}
    assert all(b.flush_cache is (mode != "in_place") for b in world.bodies(weights.SyncWeights))


def test_every_pause_has_its_resume() -> None:
    world = played()
    paused = {(b.pause, b.engine_id) for b in world.bodies(engine.EnginePaused)}
    resumed = {(b.pause, b.engine_id) for b in world.bodies(engine.EngineResumed)}
    assert paused == resumed
    assert len(paused) == 3 * 2


def test_the_pause_waits_for_every_open_request() -> None:
    world = World(small_config())
    world.boot()
    world.on_command = lambda body: not isinstance(body, turn.AbortTurns)
    world.pump()
    assert world.state.open_requests
    assert world.bodies(engine.PauseEngines) == []


def test_folding_the_log_again_decides_nothing_new_at_any_point() -> None:
    """A controller that died at any event and folds the log decides exactly what is still missing."""
    world = played()
    for end in range(1, len(world.log) + 1):
        state = RunState()
        for event in world.log[:end]:
            state.apply(event)
        later = {e.body.logical_key() for e in world.log if isinstance(e.body, Body) and e.body.logical_key()}
        for decision in decide(state):
            body = decision.command if hasattr(decision, "command") else decision.fact
            assert body.logical_key() is None or body.logical_key() in later, f"at {end}: {body}"


def test_an_engine_that_comes_back_gets_the_current_weights_alone() -> None:
    world = World(small_config())
    world.boot()
    world.on_command = lambda body: not (isinstance(body, work.CloseAdmission) and body.pause == 2)
    world.pump()
    world.append(engine.EngineLost("engine-1", "i1", "killed"))
    world.append(engine.EngineStarted("engine-1", "i2", "http://new", "fake", 0, "c0", 0.1))
    for service in world.state.admission_services():
        world.append(work.AdmissionClosed(2, service))
    world.on_command = lambda body: True
    world.pump()
    assert world.state.stopped == "completed"
    assert {e.version for e in world.state.engines.values()} == {3}


def test_a_failed_member_drops_the_group_and_another_is_admitted() -> None:
    world = World(small_config())
    world.boot()
    world.on_command = lambda body: not (isinstance(body, work.OpenAdmission) and body.purpose == "train")
    world.pump()
    world.append(sample.SampleRejected("train-0-0", "s", "train", 0, 0, "the environment gave up"))
    world.on_command = lambda body: True
    world.pump()
    opened = [b for b in world.bodies(work.OpenAdmission) if b.purpose == "train" and b.step == 1]
    assert [b.group for b in world.bodies(work.GroupDropped)] == [0]
    assert [b.end_group for b in opened] == [3, 3 + 1]


def test_failing_syncs_are_repeated_and_then_end_the_run() -> None:
    world = World(small_config())
    world.boot()

    def fail(body: Body) -> bool:
        if isinstance(body, weights.SyncWeights):
            world.append(weights.SyncFailed(body.sync, body.version, "no answer", ("engine-0",)))
            return False
        return True

    world.on_command = fail
    world.pump()
    assert world.state.stopped == "failed"
    assert len(world.bodies(weights.SyncWeights)) == 5


def test_a_person_stops_the_run_and_resume_goes_on() -> None:
    world = World(small_config())
    world.boot()
    world.on_command = lambda body: not isinstance(body, step.TrainStep)
    world.pump()
    world.append(run.StopRun("asked for by a person", 0))
    world.pump()
    assert world.state.stopped == "interrupted"
    config = world.bodies(run.RunStarted)[0].config
    world.append(run.RunResumed("r", config, "d", 1, 1, 1, True))
    assert decide(world.state) == ()
    for service in world.state.admission_services():
        world.append(run.ServiceReady(service, "http://again", 2))
    for engine_id in world.state.engine_ids:
        world.append(engine.EngineStarted(engine_id, "i9", "http://again", "fake", 0, "c0", 0.1))
    world.append(step.TrainerReady("t2", "fake", 0, 0, "d0", 0.1))
    pending = world.bodies(step.TrainStep)[-1]
    world.on_command = lambda body: True
    world.answer(pending)
    world.pump()
    assert world.state.stopped == "completed"
