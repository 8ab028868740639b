"""What a person gets wrong at the start: one clear line with the thing and the remedy, and nothing left running."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_process import ROOT, SEGUE, TrainProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def refused(*arguments: str) -> str:
    """Standard error of a `segue train` that must end with exit code 1 and one line."""
    done = subprocess.run(
        [str(SEGUE), "train", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "first-words"
    subprocess.run([sys.executable, "examples/first_words/model.py", str(folder)], cwd=ROOT, check=True, timeout=120)
    return folder


@pytest.fixture
def fakes(tmp_path: Path, model: Path) -> list[str]:
    values = {
        "run.dir": tmp_path / "runs", "run.steps": 1, "model.path": model, "engine.kind": "fake",
        "trainer.kind": "fake", "rollout.max_turn_tokens": 4,
    }  # fmt: skip
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_unknown_key_gets_the_right_one_suggested() -> None:
    line = refused("--set", "rollout.grups_per_step=3")
    assert "rollout.grups_per_step" in line
    assert "rollout.groups_per_step" in line


def test_contradicting_keys_are_both_named(fakes: list[str]) -> None:
    line = refused(*fakes, "--set", "rollout.max_turn_tokens=9999", "--set", "engine.context_length=4096")
    assert "rollout.max_turn_tokens" in line
    assert "engine.context_length" in line or "rollout.max_session_tokens" in line


def test_a_missing_model_folder_names_key_and_remedy(tmp_path: Path) -> None:
    line = refused("--set", f"model.path={tmp_path / 'nowhere'}", "--set", f"run.dir={tmp_path}")
    assert "model.path" in line
    assert "model.prepare" in line


def test_a_port_in_use_names_key_and_port(fakes: list[str], taken: int) -> None:
    line = refused(*fakes, "--set", f"session_server.port={taken}")
    assert "session_server.port" in line
    assert str(taken) in line


def test_a_log_server_that_does_not_answer_is_named_without_its_password(fakes: list[str], taken: int) -> None:
    url = f"redis://user:secret@127.0.0.1:{taken}/0"
    line = refused(*fakes, "--set", f"log.url={url}", "--set", "log.connect_timeout_s=1")
    assert str(taken) in line
    assert "log.url" in line or "[log] url" in line
    assert "secret" not in line


def test_an_engine_that_dies_at_start_ends_the_run_with_its_reason(tmp_path: Path, fakes: list[str]) -> None:
    broken = ["--set", 'engine.extra_args=["--no-such-flag"]']
    with TrainProcess(tmp_path / "runs", [*fakes, *broken]) as train:
        assert train.wait(180) == 1
        assert train.survivors() == []
        assert "engine-0" in train.text()
        assert "--no-such-flag" in train.text()


def test_resuming_what_is_no_run_says_so(tmp_path: Path) -> None:
    assert "no run 'nothing-here'" in refused("--resume", "nothing-here")
