"""The environment of this example: sums from reasoning-gym, with its verifier's verdict after each try.

    system: Reply with one number.
    user: 2 + 3 =        assistant: 5            (two worked examples, part of the prompt)
    user: 6 + 7 =        policy: 10              (a try)
    user: No, 10 is too small. 6 + 7 =
                         policy: 13              (right at the second of three tries)

The reward is the verifier's score of the last try, less the longer it took, plus a small credit for replies that are
nothing but a number. That credit gives groups some variance even while no try is right. Sums whose text hashes into the
held-out fifth are only played in evaluations.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import lease

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

TASK = "chain_sum"
OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = 1_000_000
SPACING = 64
"""Tasks between two groups: enough that each finds one of its split before the next one's begin."""
HELD_OUT_SHARE = 5

TRY_FACTORS = (1.0, 0.8, 0.6)
"""What a right answer is worth at the first, second and third try."""
FORMAT_CREDIT = 0.1
MAX_TOKENS = 8

EXAMPLES = (("2 + 3", "5"), ("9 - 4", "5"))
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of reasoning-gym: `entry` is what its verifier wants back."""

    expression: str
    answer: str
    entry: dict[str, Any]


@functools.cache
def _dataset() -> Any:
    import reasoning_gym  # takes seconds: only the program that plays pays for it

    return reasoning_gym.create_dataset(TASK, seed=0, size=TASKS, **OPTIONS)


def is_held_out(expression: str) -> bool:
    return hashlib.sha256(expression.encode()).digest()[0] % HELD_OUT_SHARE == 0


def task_of(purpose: str, group: int) -> Task:
    """The group's problem: the first of its split from the group's place in the dataset on."""
    for index in itertools.count(group * SPACING % (TASKS - SPACING)):
        entry = _dataset()[index]
        expression = entry["metadata"]["expression"]
        if is_held_out(expression) == (purpose == "eval"):
            return Task(expression, entry["answer"], entry)
    raise AssertionError("unreachable")


def score_of(reply: str, task: Task) -> float:
    """The verifier's score, 0 to 1, of the last number in the reply; 0 without a number."""
    numbers = _NUMBER.findall(reply)
    return float(_dataset().score_answer(numbers[-1], task.entry)) if numbers else 0.0


def feedback_on(reply: str, task: Task) -> str:
    numbers = _NUMBER.findall(reply)
    if not numbers:
        return f"I see no number. {task.expression} ="
    side = "small" if int(numbers[-1]) < int(task.answer) else "large"
    return f"No, {numbers[-1]} is too {side}. {task.expression} ="


def reward_of(replies: list[str], task: Task) -> float:
    bare = sum(_NUMBER.fullmatch(reply.strip()) is not None for reply in replies) / len(replies)
    return (1 - FORMAT_CREDIT) * TRY_FACTORS[len(replies) - 1] * score_of(replies[-1], task) + FORMAT_CREDIT * bare


async def play(rollout: lease.Lease, client: openai.AsyncOpenAI) -> lease.Result:
    task = task_of(rollout.purpose, rollout.group)
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Reply with one number."}]
    for expression, result in EXAMPLES:
        messages.append({"role": "user", "content": f"{expression} ="})
        messages.append({"role": "assistant", "content": result})
    messages.append({"role": "user", "content": f"{task.expression} ="})
    replies: list[str] = []
    for _ in TRY_FACTORS:
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=MAX_TOKENS)
        replies.append(answer.choices[0].message.content or "")
        if score_of(replies[-1], task) == 1.0:
            break
        messages.append({"role": "assistant", "content": replies[-1]})
        messages.append({"role": "user", "content": feedback_on(replies[-1], task)})
    return lease.Result(reward=reward_of(replies, task))


if __name__ == "__main__":
    _dataset()  # before the first lease: an import of seconds would block all turns of this process
    sys.exit(lease.main(play))
