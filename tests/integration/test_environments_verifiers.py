"""An environment that was not written for segue plays its episodes with its own code, each by a lease of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from train_process import ROOT, TrainProcess

from segue.events import sample, session, turn, work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOME = ROOT / "tests" / "environments"


def python_of(name: str) -> Path:
    """The interpreter of the environment's own virtual environment, made from its lock."""
    target = ROOT / ".cache" / "environments" / name
    private = ROOT / ".cache" / "uv" / "bin" / "uv"
    uv = str(private) if private.is_file() else shutil.which("uv")
    assert uv, "uv is needed for the environment's own packages: `make setup` fetches it"
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(target)}
    subprocess.run(
        [uv, "sync", "--frozen", "--compile-bytecode", "--python", "3.12", "--project", str(HOME / name)],
        cwd=ROOT, check=True, capture_output=True, timeout=600, env=environment,
    )  # fmt: skip
    return target / "bin" / "python"


def test_verifiers_plays_multi_turn_episodes_untouched(tmp_path: Path) -> None:
    python, launcher = python_of("verifiers"), HOME / "verifiers" / "launch.py"
    assert len(launcher.read_text().splitlines()) <= 40
    model, runs = tmp_path / "model", tmp_path / "runs"
    subprocess.run([sys.executable, "examples/first_words/model.py", str(model)], cwd=ROOT, check=True, timeout=120)
    command = f'environment.command=["{python}", "{launcher}"]'
    values = {
        "run.name": "foreign", "run.steps": 2, "run.dir": runs, "model.path": model, "engine.kind": "fake",
        "engine.extra_args": '["--eos-p", "0"]', "trainer.kind": "fake", "rollout.groups_per_step": 2,
        "rollout.group_size": 2, "rollout.max_turn_tokens": 6, "rollout.max_session_tokens": 512,
        "environment.workers": 2, "checkpoint.every": 2,
    }  # fmt: skip
    options = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    with TrainProcess(runs, [*options, "--set", command]) as train:
        assert train.wait(240) == 0, train.text()
        events = train.events()
    samples = [e.body for e in events if isinstance(e.body, sample.SampleReady)]
    assert len(samples) >= 2 * 2 * 2
    assert {s.turns for s in samples} == {3}
    assert all(s.reward in (0.0, 1.0, 2.0, 3.0) for s in samples)
    turns = [e.body for e in events if isinstance(e.body, turn.TurnCommitted)]
    assert len({t.session_id for t in turns if t.parent_id == ""}) == sum(t.parent_id == "" for t in turns)
    parents = [(t.session_id, t.parent_id) for t in turns]
    assert len(set(parents)) == len(parents), "each turn goes on from the one before: no branch by accident"
    assert not [e for e in events if isinstance(e.body, turn.TurnFailed | work.RolloutReturned | sample.SampleRejected)]
    finished = {e.body.session_id for e in events if isinstance(e.body, session.SessionFinished)}
    assert {s.session_id for s in samples} == finished
