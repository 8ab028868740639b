"""The real process tree with fake engine and trainer: a run completes, survives kills of every part, and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from train_process import ROOT, TrainProcess

from segue.events import Recorded, run, step, turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_S, RUN_S = 120.0, 180.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import subprocess

    folder = tmp_path_factory.mktemp("model") / "first-words"
    subprocess.run([sys.executable, "examples/first_words/model.py", str(folder)], cwd=ROOT, check=True, timeout=120)
    return folder


def arguments(runs: Path, model: Path, *, steps: int, **options: object) -> list[str]:
    values: dict[str, object] = {
        "run.name": "whole", "run.steps": steps, "run.dir": runs, "model.path": model, "engine.kind": "fake",
        "engine.fake_token_s": 0.02, "trainer.kind": "fake", "rollout.groups_per_step": 3, "rollout.group_size": 2,
        "rollout.extra_groups": 1, "rollout.max_turn_tokens": 4, "rollout.max_session_tokens": 512, "r3.enabled": True,
        "environment.command": ["{python}", "examples/first_words/environment.py"], "environment.concurrency": 4,
        "checkpoint.every": 3, **{key.replace("__", "."): value for key, value in options.items()},
    }  # fmt: skip
    return [part for key, value in values.items() for part in ("--set", f"{key}={_toml(value)}")]


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float | list) else str(value)


def steps_done(count: int) -> object:
    def met(events: list[Recorded]) -> bool:
        return sum(isinstance(e.body, step.StepFinished) for e in events) >= count

    return met


def assert_trained_once(events: list[Recorded], steps: int) -> None:
    """Every step stands in the log once, and no sample belongs to two of them."""
    finished = [e.body for e in events if isinstance(e.body, step.StepFinished)]
    assert [b.step for b in finished] == list(range(1, steps + 1))
    planned = [s for e in events if isinstance(e.body, step.StepPlanned) for s in e.body.sample_ids]
    assert len(planned) == len(set(planned)) == steps * 3 * 2


def assert_turns_complete(events: list[Recorded]) -> None:
    """Every request that was sent has exactly one end."""
    sent = {e.body.request_id for e in events if isinstance(e.body, turn.TurnStarted | turn.TurnResumed)}
    ends = [
        e.body.request_id
        for e in events
        if isinstance(e.body, turn.TurnCommitted | turn.TurnInterrupted | turn.TurnDiscarded | turn.TurnFailed)
    ]
    assert len(ends) == len(set(ends))
    assert set(ends) <= sent


def test_every_part_is_killed_in_turn_and_the_run_ends_with_the_same_steps(tmp_path: Path, model: Path) -> None:
    with TrainProcess(tmp_path / "runs", arguments(tmp_path / "runs", model, steps=7)) as train:
        marks = ["session_server", "-m controller", "actors.engines.fake", "ray::TrainerShell"]
        for done, mark in enumerate(marks, start=1):
            train.until(steps_done(done), START_S)
            train.kill(mark)
        assert train.wait(RUN_S) == 0, train.text()
        assert train.survivors() == []
        events = train.events()
    assert_trained_once(events, 7)
    assert_turns_complete(events)
    restarted = {e.body.process for e in events if isinstance(e.body, run.ProcessRestarted)}
    assert restarted >= {"session-0", "controller", "engine-0", "trainer"}


def test_ctrl_c_then_a_killed_supervisor_and_each_resume_goes_on(tmp_path: Path, model: Path) -> None:
    runs = tmp_path / "runs"
    with TrainProcess(runs, arguments(runs, model, steps=4)) as train:
        train.until(steps_done(1), START_S)
        train.interrupt()
        assert train.wait(60) == 130, train.text()
        assert train.survivors() == []
        assert "segue train --resume" in train.text()
    with TrainProcess(runs, ["--resume", str(train.folder)]) as resumed:
        resumed.until(steps_done(2), START_S)
        resumed.kill_supervisor()
        assert resumed.survivors(30.0) == []
        before = len(resumed.events())
    with TrainProcess(runs, ["--resume", str(train.folder)]) as last:
        assert last.wait(RUN_S) == 0, last.text()
        assert last.survivors() == []
        events = last.events()
    assert len(events) > before
    assert_trained_once(events, 4)
    assert_turns_complete(events)
    assert sum(isinstance(e.body, run.RunResumed) and e.body.whole for e in events) == 2
    summary = json.loads((train.folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 4)
    assert (train.folder / "reward.png").stat().st_size > 5_000
