"""An environment that was not written for segue plays its episodes with its own code, each by a lease of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from train_process import ROOT, TrainProcess

from segue.events import Recorded, sample, session, turn, work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOME = ROOT / "tests" / "environments"


def python_of(name: str) -> Path:
    """The interpreter of the environment's own virtual environment, made from its lock."""
    target = ROOT / ".cache" / "environments" / name
    private = ROOT / ".cache" / "uv" / "bin" / "uv"
    uv = str(private) if private.is_file() else shutil.which("uv")
    assert uv, "uv is needed for the environment's own packages: `make setup` fetches it"
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(target)}
    if pip_cert := environment.get("PIP_CERT"):  # as deploy/setup.sh: what pip was told of a proxy is meant for uv too
        environment.setdefault("SSL_CERT_FILE", pip_cert)
    subprocess.run(
        [uv, "sync", "--frozen", "--compile-bytecode", "--python", "3.12", "--project", str(HOME / name)],
        cwd=ROOT, check=True, timeout=600, env=environment,
    )  # fmt: skip
    return target / "bin" / "python"


def played(name: str, tmp_path: Path, **options: object) -> list[Recorded]:
    """The events of a short run, fakes at both ends, whose environment is `name`'s launcher in its own packages."""
    python, launcher = python_of(name), HOME / name / "launch.py"
    assert len(launcher.read_text().splitlines()) <= 40
    model, runs = tmp_path / "model", tmp_path / "runs"
    subprocess.run([sys.executable, "examples/first_words/model.py", str(model)], cwd=ROOT, check=True, timeout=120)
    values = {
        "run.name": "foreign", "run.steps": 2, "run.dir": runs, "model.path": model, "engine.kind": "fake",
        "engine.extra_args": '["--eos-p", "0"]', "trainer.kind": "fake", "rollout.groups_per_step": 2,
        "rollout.group_size": 2, "rollout.max_turn_tokens": 6, "environment.concurrency": 2, "checkpoint.every": 2,
        "environment.command": f'["{python}", "{launcher}"]', **options,
    }  # fmt: skip
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    with TrainProcess(runs, settings) as train:
        assert train.wait(240) == 0, train.text()
        events = train.events()
    assert not [e for e in events if isinstance(e.body, turn.TurnFailed | work.RolloutReturned | sample.SampleRejected)]
    finished = {e.body.session_id for e in events if isinstance(e.body, session.SessionFinished)}
    assert {s.session_id for s in samples_of(events)} == finished
    assert len(finished) >= 2 * 2 * 2
    return events


def samples_of(events: list[Recorded]) -> list[sample.SampleReady]:
    return [e.body for e in events if isinstance(e.body, sample.SampleReady)]


def test_verifiers_plays_multi_turn_episodes_untouched(tmp_path: Path) -> None:
    events = played("verifiers", tmp_path, **{"environment.workers": 2})
    assert {s.turns for s in samples_of(events)} == {3}
    assert all(s.reward in (0.0, 1.0, 2.0, 3.0) for s in samples_of(events))
    parents = [(e.body.session_id, e.body.parent_id) for e in events if isinstance(e.body, turn.TurnCommitted)]
    assert len(set(parents)) == len(parents), "each turn goes on from the one before: no branch by accident"


def test_textarena_plays_its_games_with_its_own_agent_untouched(tmp_path: Path) -> None:
    """Its agent shows the whole game in one message each time: the turns of a game are conversations of their own."""
    events = played("textarena", tmp_path)
    turns = [e.body for e in events if isinstance(e.body, turn.TurnCommitted)]
    for found in samples_of(events):
        assert sum(t.session_id == found.session_id for t in turns) >= 2
        assert 0.0 <= found.reward <= 1.0
        assert found.trained_tokens == sum(t.output_tokens for t in turns if t.session_id == found.session_id)
