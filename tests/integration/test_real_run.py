"""The real engine and the real trainer in the whole process tree: each is killed once, and the steps come out right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from train_process import ROOT, TrainProcess

from segue.events import Recorded, engine, run, step, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "first-words"
    subprocess.run([sys.executable, "examples/first_words/model.py", str(folder)], cwd=ROOT, check=True, timeout=120)
    return folder


def steps_done(events: list[Recorded]) -> int:
    return sum(isinstance(e.body, step.StepFinished) for e in events)


def test_real_engine_and_trainer_survive_a_kill_and_agree_to_the_last_bit(tmp_path: Path, model: Path) -> None:
    settings = {
        "run.steps": 4, "run.dir": tmp_path / "runs", "model.path": model, "rollout.groups_per_step": 4,
        "rollout.group_size": 4, "checkpoint.every": 2, "evaluation.groups": 0, "environment.concurrency": 8,
    }  # fmt: skip
    arguments = ["--config", "examples/first_words/run.toml"]
    arguments += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with TrainProcess(tmp_path / "runs", arguments) as train:
        train.until(lambda events: steps_done(events) >= 1, 240)
        train.kill("ray::TrainerShell")
        train.until(lambda events: steps_done(events) >= 2, 240)
        train.kill("sglang_launch")
        assert train.wait(300) == 0, train.text()
        assert train.survivors() == []
        events = train.events()
        summary = json.loads((train.folder / "summary.json").read_text())
    finished = [e.body for e in events if isinstance(e.body, step.StepFinished)]
    assert [b.step for b in finished] == [1, 2, 3, 4]
    trained = [s for e in events if isinstance(e.body, step.StepPlanned) for s in e.body.sample_ids]
    assert len(trained) == len(set(trained)) == 4 * 4 * 4
    restarted = {e.body.process for e in events if isinstance(e.body, run.ProcessRestarted)}
    assert restarted >= {"trainer", "engine-0"}
    # The trainer that came back re-executed step 1 from the log: another digest would have been refused.
    ready = [e.body for e in events if isinstance(e.body, step.TrainerReady)]
    assert len(ready) >= 2
    assert ready[1].digest == {b.step: b.digest for b in finished}[ready[1].step]
    assert len([e for e in events if isinstance(e.body, engine.EngineStarted)]) == 2
    synced = [e.body for e in events if isinstance(e.body, weights.WeightsSynced)]
    assert all(b.proved for b in synced)
    assert summary["rows_replayed"] > 0
    assert summary["logprob_abs_diff_mean"] <= 1e-4
