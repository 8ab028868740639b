"""The environment of examples/first_words as a program, against a stub of the session server; and its model folder."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest
from stub_sessions import WORKER_TOKEN, StubSessions

from segue.config import load_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "first_words"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"first_words_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment = load("environment")


def obedient(messages: list[dict[str, str]]) -> tuple[str, str]:
    return messages[-1]["content"].split()[-1], "stop"


@asynccontextmanager
async def program(stub: StubSessions, concurrency: int = 4) -> AsyncIterator[asyncio.subprocess.Process]:
    """The environment program, working for `stub`; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE / "environment.py"),
        env={
            **os.environ, "SEGUE_BASE_URL": stub.url, "SEGUE_WORKER_TOKEN": WORKER_TOKEN,
            "SEGUE_CONCURRENCY": str(concurrency), "SEGUE_WORKER": "env-0",
        },
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_plays_leased_rollouts_to_their_end_and_gives_each_turn_its_reward() -> None:
    stub = StubSessions(obedient, iter([("train", group) for group in range(20)]))
    async with stub.running(), program(stub):
        await stub.until(lambda: len(stub.finished) == 20)
        assert {tuple(body["per_turn"]) for body in stub.finished.values()} == {(1.0, 1.0, 1.0)}
        assert 1 < stub.open_most <= 4
        assert set(stub.turns.values()) == {3}
        for session_id, (purpose, group) in stub.sessions.items():
            asked = [m["content"].split()[-1] for m in stub.transcripts[session_id] if m["role"] == "user"]
            assert tuple(asked) == environment.task_of(purpose, group)
        workers = {body["worker"] for body in stub.lease_bodies}
        assert len(workers) == 1
        assert re.fullmatch(r"env-0/[0-9a-f]{8}", workers.pop())


async def test_what_the_policy_said_decides_reward_and_feedback() -> None:
    said = iter([("ball", "stop"), ("ball moon", "length"), ("", "stop")])
    stub = StubSessions(lambda messages: next(said), iter([("train", 0)]))
    async with stub.running(), program(stub):
        await stub.until(lambda: len(stub.finished) == 1)
    wanted = environment.task_of("train", 0)
    expected = [
        environment.reward_of(["ball"], True, wanted[0]),
        environment.reward_of(["ball", "moon"], False, wanted[1]),
        0.0,
    ]
    assert stub.finished["s0"]["per_turn"] == expected
    users = [m["content"] for m in stub.transcripts["s0"] if m["role"] == "user"]
    assert users[0] == f"say {wanted[0]}"
    assert users[1] == f"{'right' if expected[0] == 1.0 else 'wrong'} say {wanted[1]}"
    assert users[2] == f"wrong say {wanted[2]}"


async def test_a_turn_that_fails_for_now_is_asked_again_and_a_lost_session_is_dropped() -> None:
    stub = StubSessions(obedient, iter([("train", 0), ("train", 1)]), fail=[503, 410])
    async with stub.running(), program(stub, concurrency=1):
        await stub.until(lambda: len(stub.finished) == 1)
    assert stub.turns == {"s0": 2, "s1": 3}
    assert list(stub.finished) == ["s1"]
    assert stub.deleted == []


async def test_a_rollout_that_cannot_go_on_is_given_up_and_the_worker_goes_on() -> None:
    stub = StubSessions(obedient, iter([("train", 0), ("train", 1)]), fail=[400])
    async with stub.running(), program(stub, concurrency=1):
        await stub.until(lambda: len(stub.finished) == 1)
    assert stub.deleted == ["s0"]
    assert list(stub.finished) == ["s1"]


async def test_a_server_that_is_away_is_waited_for() -> None:
    stub = StubSessions(obedient, iter([("train", 0)]))
    async with program(stub) as process:
        await asyncio.sleep(3.0)
        assert process.returncode is None
        async with stub.running():
            await stub.until(lambda: len(stub.finished) == 1)


@pytest.mark.parametrize("when", ["playing", "waiting for a lease"])
async def test_sigterm_ends_it_at_once_and_cleanly(when: str) -> None:
    held = itertools.repeat(("train", 0)) if when == "playing" else iter([("train", 0)])
    stub = StubSessions(obedient, held)
    async with stub.running(), program(stub) as process:
        await stub.until(lambda: len(stub.finished) >= 1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5.0) == 0


def test_held_out_tasks_are_never_trained_and_steps_are_balanced() -> None:
    evaluated = [environment.task_of("eval", group) for group in range(16)]
    trained = [environment.task_of("train", group) for group in range(96)]
    assert len(set(evaluated)) == 16
    assert not set(evaluated) & set(trained)
    assert Counter(Counter(trained).values()) == {2: 48}
    for tasks in (evaluated, *(trained[i : i + 4] for i in range(0, 96, 4))):
        for turn in range(environment.TURNS):
            assert set(Counter(task[turn] for task in tasks).values()) == {len(tasks) // 4}


def test_the_best_policy_that_does_not_read_scores_far_below_the_best() -> None:
    command = [sys.executable, str(EXAMPLE / "environment.py"), "--prompt-blind"]
    printed = subprocess.run(command, check=True, capture_output=True, timeout=30).stdout
    blind = json.loads(printed)["reward_prompt_blind"]
    # One word always, and then stop: right in a quarter of the tasks (1.0), one of the four in the others (0.3).
    assert blind == pytest.approx(0.25 * 1.0 + 0.75 * 0.3)
    assert environment.prompt_blind() == blind


@pytest.mark.slow
def test_the_model_folder_is_whole_and_its_words_are_what_the_environment_says(tmp_path: Path) -> None:
    from safetensors import safe_open
    from tokenizers import Tokenizer

    folder = tmp_path / "model"
    command = [sys.executable, str(EXAMPLE / "model.py"), str(folder), "--seed", "3"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 64
    for text in ("right say ball", *environment.SYMBOLS):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]
    with safe_open(folder / "model.safetensors", "np") as tensors:
        names = list(tensors.keys())
        assert sum(int(tensors.get_tensor(name).size) for name in names) == 453_312
        assert "model.layers.3.mlp.experts.7.down_proj.weight" in names
        assert {str(tensors.get_tensor(name).dtype) for name in names} == {"float32"}


def test_the_run_compares_with_the_best_policy_that_ignores_the_prompt() -> None:
    config = load_config(EXAMPLE / "run.toml")
    assert config.environment.baselines["prompt_blind"] == pytest.approx(environment.prompt_blind())
