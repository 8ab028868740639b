"""Modes as data: what may overlap, how far ahead groups are admitted, how old a sample may be; filters, early stop."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from scripted_world import World, small_config

from controller.decide import decide
from segue.config.schema import Config, Evaluation, Offload, Run
from segue.events import engine, run, sample, step, weights, work
from segue.events.base import Body, Bulk
from segue.events.handoff import HandoffFinished, HandoffPlanned
from segue.events.offload import Onloaded, Released

ASYNC = ("one_step_async", "fully_async")


def played(config: Config) -> World:
    world = World(config)
    world.boot()
    world.pump()
    return world


def groups_of(command: step.TrainStep) -> list[int]:
    return sorted({int(name.split("-")[1]) for name in command.sample_ids})


@pytest.mark.parametrize("mode", ["colocated", *ASYNC])
def test_every_mode_trains_each_sample_once_and_completes(mode: str) -> None:
    world = played(small_config(mode=mode))
    assert world.state.stopped == "completed"
    assert [b.step for b in world.bodies(step.StepFinished)] == [1, 2, 3]
    trained = [s for b in world.bodies(step.TrainStep) for s in b.sample_ids]
    assert len(trained) == len(set(trained)) == 3 * 2 * 2
    paused = {(b.pause, b.engine_id) for b in world.bodies(engine.EnginePaused)}
    assert paused == {(b.pause, b.engine_id) for b in world.bodies(engine.EngineResumed)}
    assert {e.version for e in world.state.engines.values()} == {3}


@pytest.mark.parametrize("mode", ASYNC)
def test_training_beside_the_rollouts_needs_no_pause_but_the_sync_does(mode: str) -> None:
    names = played(small_config(mode=mode)).names()
    assert names.index("step.train") < names.index("work.close_admission") < names.index("engine.pause")
    assert names.index("engine.paused") < names.index("weights.sync") < names.index("engine.resume")
    assert names.index("step.finished") < names.index("work.close_admission")


def held_training(mode: str, **rollout: object) -> World:
    """A world whose trainer never finishes step 1."""
    world = World(small_config(mode=mode, **rollout))
    world.boot()
    world.on_command = lambda body: not isinstance(body, step.TrainStep)
    world.pump()
    return world


@pytest.mark.parametrize(
    ("mode", "bound", "batches"),
    [("colocated", 1, 1), ("one_step_async", 1, 2), ("fully_async", 1, 2), ("fully_async", 2, 3)],
)
def test_groups_are_admitted_as_far_ahead_as_the_mode_and_the_bound_allow(mode: str, bound: int, batches: int) -> None:
    world = held_training(mode, max_staleness=bound)
    assert world.state.admitted_end["train"] == batches * 2 + 1, "two groups a batch, and one extra"


def test_open_groups_are_bounded_by_their_budget() -> None:
    world = World(small_config(mode="fully_async", max_staleness=2, max_open_groups=2))
    world.boot()
    world.on_command = lambda body: not (isinstance(body, work.OpenAdmission) and body.purpose == "train")
    world.pump()
    assert world.state.admitted_end["train"] == 2
    for member in range(2):
        world.finish("train", 0, member)
    world.pump()
    assert world.state.admitted_end["train"] == 3, "one group is complete: one more may start"


def test_one_step_async_syncs_between_batches_only() -> None:
    """The batch beside training comes from one version: its last group holds the sync up."""
    world = World(small_config(mode="one_step_async"))
    world.boot()
    opened = 0

    def one_batch_only(body: Body) -> bool:
        nonlocal opened
        if isinstance(body, work.OpenAdmission) and body.purpose == "train":
            opened += 1
            return opened == 1
        return True

    world.on_command = one_batch_only
    world.pump()
    assert [b.step for b in world.bodies(step.StepFinished)] == [1]
    assert world.bodies(work.CloseAdmission) == []
    world.on_command = lambda body: True
    for group in (2, 3):
        for member in range(2):
            world.finish("train", group, member)
    world.pump()
    assert world.state.stopped == "completed"


def ready(group: int, member: int, oldest: int, reward: float = 0.5) -> sample.SampleReady:
    name = f"train-{group}-{member}"
    return sample.SampleReady(
        name, name, f"s-{name}", "train", group, member, reward, 10, 4, 2, 0, oldest, oldest, Bulk("d" * 64, 10),
        f"f-{name}",
    )  # fmt: skip


def test_a_sample_older_than_the_bound_never_trains_and_its_group_is_dropped_whole() -> None:
    world = held_training("fully_async", max_staleness=0)
    world.append(ready(1000, 0, oldest=0))
    (command,) = world.bodies(step.TrainStep)
    world.append(step.StepFinished(1, 1, 1, "d1", {}, 0.0, 0.0))
    world.version = 1
    world.on_command = lambda body: not (isinstance(body, work.OpenAdmission) and body.purpose == "train")
    world.pump()
    dropped = {b.group: b.reason for b in world.bodies(work.GroupDropped)}
    assert 1000 in dropped
    assert dropped[1000] == "stale: sampled by version 0, the trainer holds 1"
    assert not set(dropped) & set(groups_of(command))
    assert len(world.bodies(step.TrainStep)) == 1, "what was complete before is stale as well"


def test_a_complete_group_that_grew_stale_is_replaced_by_another() -> None:
    world = held_training("fully_async", max_staleness=0)
    before = world.state.admitted_end["train"]
    assert len(world.state.trainable) == 0
    world.append(ready(2, 0, oldest=0))
    world.append(ready(2, 1, oldest=0))
    world.pump()
    assert list(world.state.trainable) == [2]
    settled = world.state.settled_train
    world.append(step.StepFinished(1, 1, 1, "d1", {}, 0.0, 0.0))
    decided = [d.fact for d in decide(world.state) if hasattr(d, "fact")]
    assert [type(fact) for fact in decided] == [work.GroupDropped]
    world.append(decided[0])
    assert world.state.settled_train == settled, "it was settled already"
    world.version = 1
    world.on_command = lambda body: True
    world.pump()
    assert world.state.admitted_end["train"] > before
    assert world.state.stopped == "completed"


def test_a_group_without_a_difference_in_reward_can_be_filtered() -> None:
    world = World(small_config(drop_uniform=True))
    world.boot()
    world.on_command = lambda body: not (isinstance(body, work.OpenAdmission) and body.purpose == "train")
    world.pump()
    for member in range(2):
        world.append(ready(0, member, 0, reward=1.0))
        world.append(ready(1, member, 0, reward=float(member)))
    world.pump()
    assert [b.group for b in world.bodies(work.GroupDropped)] == [0]
    assert [b.group for b in world.bodies(work.GroupCompleted) if b.purpose == "train"] == [1]
    assert world.state.admitted_end["train"] == 4, "two a batch, one extra, one for the dropped"


def test_an_evaluation_that_is_good_enough_ends_the_run_with_a_checkpoint() -> None:
    config = msgspec.structs.replace(
        small_config(), run=Run(steps=50), evaluation=Evaluation(every=2, groups=1, group_size=2, stop_at=0.5)
    )
    world = World(config)
    world.boot()
    world.on_command = lambda body: not (isinstance(body, work.OpenAdmission) and body.purpose == "eval")
    world.pump()
    for member in range(2):  # the first evaluation: not there yet
        name = f"eval-0-{member}"
        world.append(msgspec.structs.replace(ready(0, member, 0, 0.1), purpose="eval", rollout_id=name, sample_id=name))
    world.on_command = lambda body: True
    world.pump()
    assert world.state.stopped == "completed"
    assert [b.step for b in world.bodies(step.EvaluationFinished)] == [0, 2]
    assert world.bodies(step.CheckpointCommitted)[-1].step == 2
    assert world.bodies(run.RunStopped)[-1].detail == "2 steps"


def test_a_batch_has_the_order_of_its_groups_since_version_2() -> None:
    for version, expected in ((1, [1, 0]), (2, [0, 1])):
        world = World(small_config())
        world.boot()
        world.state.decide_version = version
        world.on_command = lambda body: not (isinstance(body, work.OpenAdmission) and body.purpose == "train")
        world.pump()
        for group in (1, 0):
            for member in range(2):
                world.append(ready(group, member, 0))
            world.pump()
        (command,) = world.bodies(step.TrainStep)[:1]
        assert [int(name.split("-")[1]) for name in command.sample_ids[::2]] == expected


@pytest.mark.parametrize("mode", ASYNC)
def test_an_engine_that_returns_beside_training_is_synced_and_the_run_goes_on(mode: str) -> None:
    world = held_training(mode)
    world.append(engine.EngineLost("engine-1", "i1", "killed"))
    world.append(engine.EngineStarted("engine-1", "i2", "http://new", "fake", 0, "c0", 0.1))
    world.on_command = lambda body: True
    world.append(step.StepFinished(1, 1, 1, "d1", {}, 0.0, 0.0))
    world.version = 1
    world.pump()
    assert world.state.stopped == "completed"
    assert all(b.version <= 3 for b in world.bodies(weights.WeightsSynced))


GIB = {
    "weights": 10.0, "mirror": 10.0, "kv_cache": 20.0, "cuda_graph": 1.0, "params": 10.0, "grads": 20.0,
    "optimizer": 60.0, "activations": 15.0, "backup": 60.0, "pinned": 10.0, "contexts": 2.0, "bucket": 0.5,
}  # fmt: skip


def handing_over(order: Literal["host", "device"], **rollout: object) -> World:
    offload = Offload(level=("weights", "kv_cache"), memory_peak=order, sizes_gib=GIB)
    return World(msgspec.structs.replace(small_config(**rollout), offload=offload))


def moves(world: World, pause: int) -> list[str]:
    return [
        f"{'release' if isinstance(b, Released) else 'onload'} {b.owner} {'+'.join(b.tags)}"
        for e in world.log
        if isinstance(b := e.body, Released | Onloaded) and b.pause == pause
    ]


@pytest.mark.parametrize("order", ["host", "device"])
def test_memory_changes_hands_in_the_planned_order_around_training_and_sync(order: Literal["host", "device"]) -> None:
    world = handing_over(order)
    world.boot()
    world.pump()
    assert world.state.stopped == "completed"
    assert moves(world, 0) == ["release trainer grads", "release trainer params+optimizer+default"]
    kv, weights_ = "kv_cache+cuda_graph", "weights"
    out = {
        "host": [
            *[f"release engine-{i} {weights_}+{kv}" for i in (0, 1)], "onload trainer params+grads+optimizer+default",
        ],
        "device": [
            *[f"release engine-{i} {kv}" for i in (0, 1)], "onload trainer params+grads+optimizer+default",
            *[f"release engine-{i} {weights_}" for i in (0, 1)],
        ],
    }[order]  # fmt: skip
    trainer_leaves = "release trainer params+optimizer+default"
    weights_come = [f"onload engine-{i} {weights_}" for i in (0, 1)]
    middle = [trainer_leaves, *weights_come] if order == "host" else [*weights_come, trainer_leaves]
    back = ["release trainer grads", *middle, *[f"onload engine-{i} cuda_graph+kv_cache" for i in (0, 1)]]
    for pause in (1, 2, 3):
        assert moves(world, pause) == [*out, *back]
    names = [e.envelope.type for e in world.log if getattr(e.body, "pause", getattr(e.body, "step", 0)) == 1]
    assert names.index("handoff.planned") < names.index("offload.released") < names.index("step.train")
    assert names.index("step.finished") < names.index("handoff.finished") < names.index("engine.resumed")
    planned = world.bodies(HandoffPlanned)
    finished = world.bodies(HandoffFinished)
    assert [b.pause for b in planned] == [b.pause for b in finished] == [1, 2, 3]
    most = 2 + 10 + 20 + 60 + 10 if order == "device" else 2 + 10 + 20 + 60 + 15
    assert planned[0].predicted_device_bytes == max(most, 2 + 10 + 20 + 60 + 15) * 2**30
    assert planned[0].predicted_host_bytes == (10 + 10 + 60 if order == "host" else 10 + 60) * 2**30


@pytest.mark.parametrize("order", ["host", "device"])
def test_the_sync_reads_where_the_weights_are_and_before_the_cache_comes_back(order: Literal["host", "device"]) -> None:
    world = handing_over(order)
    world.boot()
    world.pump()
    for sync in world.bodies(weights.WeightsSynced):
        at = next(e.position for e in world.log if e.body is sync)
        away: dict[str, set[str]] = {}
        for event in world.log[:at]:
            if isinstance(event.body, Released):
                away.setdefault(event.body.owner, set()).update(event.body.tags)
            elif isinstance(event.body, Onloaded):
                away.setdefault(event.body.owner, set()).difference_update(event.body.tags)
        for name in sync.engines:
            assert "weights" not in away[name]
            assert "kv_cache" in away[name]


def test_an_engine_that_comes_back_while_the_trainer_works_gives_its_memory_up_too() -> None:
    world = handing_over("host")
    world.boot()
    world.on_command = lambda body: not isinstance(body, step.TrainStep)
    world.pump()
    world.append(engine.EngineLost("engine-1", "i1", "killed"))
    world.append(engine.EngineStarted("engine-1", "i2", "http://new", "fake", 0, "c0", 0.1))
    world.pump()
    again = [b for b in world.bodies(Released) if b.owner == "engine-1" and b.incarnation == "i2"]
    assert [b.tags for b in again] == [("weights", "kv_cache", "cuda_graph")]
    world.on_command = lambda body: True
    world.append(step.StepFinished(1, 1, 1, "d1", {}, 0.0, 0.0))
    world.version = 1
    world.pump()
    assert world.state.stopped == "completed"
    assert all(not tags for owner, tags in world.state.released.items() if owner != "trainer")


def test_without_a_level_nothing_moves() -> None:
    world = played(small_config())
    assert world.bodies(Released) == world.bodies(Onloaded) == world.bodies(HandoffPlanned) == []
