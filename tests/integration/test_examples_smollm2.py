"""The environment of examples/smollm2_arithmetic as a program, and its model folder from the real package."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2_arithmetic"
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from stub_sessions import WORKER_TOKEN, StubSessions  # noqa: E402

pytest.importorskip("reasoning_gym", reason="the group 'examples' is not installed: it needs a C compiler")


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_environment", EXAMPLE / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_problems_are_the_verifiers_own_and_held_out_ones_are_never_trained(environment: ModuleType) -> None:
    trained = [environment.task_of("train", group) for group in range(100)]
    evaluated = [environment.task_of("eval", group) for group in range(100)]
    for task in trained + evaluated:
        assert int(task.answer) == eval(task.expression)  # two numbers and a sign, made by reasoning-gym
        assert environment.score_of(f"that is {task.answer}", task) == 1.0
        assert environment.score_of(f"{int(task.answer) + 1}", task) < 1.0
    assert not {task.expression for task in trained} & {task.expression for task in evaluated}
    assert len({task.expression for task in trained}) > 30
    assert environment.task_of("train", 7) == trained[7]


def test_reward_falls_with_each_try_and_credits_bare_numbers(environment: ModuleType) -> None:
    task = environment.task_of("train", 0)
    first = environment.reward_of([task.answer], task)
    second = environment.reward_of(["9999", task.answer], task)
    talking = environment.reward_of([f"It is {task.answer}."], task)
    third = environment.reward_of(["9999", "9999", task.answer], task)
    assert first == pytest.approx(1.0)
    assert 1.0 > second > third > environment.reward_of(["9999"] * 3, task) > environment.reward_of(["hm"] * 3, task)
    assert talking == pytest.approx(0.9)
    assert environment.reward_of(["hm"] * 3, task) == 0.0


async def test_it_tries_three_times_with_the_verifiers_verdict_in_between(environment: ModuleType) -> None:
    wrong = StubSessions(lambda messages: ("99", "stop"), iter([("train", 0)]))
    right = StubSessions(_calculate, iter([("train", 1)]))
    for stub in (wrong, right):
        async with stub.running():
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(EXAMPLE / "environment.py"),
                env={**os.environ, "SEGUE_BASE_URL": stub.url, "SEGUE_WORKER_TOKEN": WORKER_TOKEN},
            )  # fmt: skip
            try:
                await stub.until(lambda stub=stub: len(stub.finished) == 1)
            finally:
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 10) == 0
    task = environment.task_of("train", 0)
    said = [m["content"] for m in wrong.transcripts["s0"] if m["role"] == "user"][2:]
    assert said == [f"{task.expression} =", *[f"No, 99 is too large. {task.expression} ="] * 2]
    assert wrong.finished["s0"]["reward"] == pytest.approx(environment.reward_of(["99"] * 3, task))
    assert right.turns == {"s0": 1}
    assert right.finished["s0"]["reward"] == pytest.approx(1.0)


def _calculate(messages: list[dict[str, str]]) -> tuple[str, str]:
    return str(eval(messages[-1]["content"].removesuffix("="))), "stop"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_packages_gguf_becomes_a_whole_model_folder(tmp_path: Path) -> None:
    from safetensors import safe_open
    from tokenizers import Tokenizer

    folder = tmp_path / "smollm2"
    subprocess.run(
        [sys.executable, str(EXAMPLE / "model.py"), str(folder)], check=True, capture_output=True, timeout=280
    )
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 30, 49152)
    assert "quantization_config" not in config
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert len(names) == 272
        assert sum(tensors.get_tensor(name).numel() for name in names) == 134_515_008
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("6 + 7 = 13").ids) == "6 + 7 = 13"
    assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
