"""The environment of this example: three turns in which the policy must say the word that it was told to say.

    user: say moon            policy: tree       (0.3: one of the four words, but not this one; and then it stopped)
    user: wrong say ball      policy: ball a     (0.6: begins with the right word)
    user: wrong say cat       policy: cat        (1.0: the word and nothing else)

Tasks are the 64 sequences of three of the four words. Adding 1 to every word of a sequence (cyclically) gives its
orbit of four sequences, in which each word stands once at each turn. Whole orbits are held out for evaluation, so that
held-out episodes are new to the policy and balanced: a policy that ignores what it is told gains nothing from knowing
which sequences are left.

Run by segue (see run.toml), or by hand: `environment.py --prompt-blind` prints the score that needs no reading.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parents[1]))

import lease

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

SYMBOLS = ("ball", "cat", "moon", "tree")
TURNS = 3
MAX_TOKENS = 2
HELD_OUT_ORBITS = 4

FIRST_WORD = {"right": 0.6, "of the four": 0.2, "other": 0.0}
STOPPED_AFTER_ONE_WORD = {"right": 0.4, "of the four": 0.1, "other": 0.1}
"""The one table of rewards: for the first word, and for stopping after it. Only exactly the word asked for gives 1.

The small steps matter: a random policy is exact once in 4,096 turns, which is no signal to learn from.
"""

Task = tuple[str, ...]


def _orbits() -> list[list[Task]]:
    """The 16 orbits of the 64 tasks, in the order of a hash: fixed, and unrelated to what is in them."""
    size = len(SYMBOLS)
    starts = ((0, *rest) for rest in itertools.product(range(size), repeat=TURNS - 1))
    orbits = [[tuple(SYMBOLS[(i + shift) % size] for i in start) for shift in range(size)] for start in starts]
    return sorted(orbits, key=lambda orbit: hashlib.sha256(" ".join(orbit[0]).encode()).digest())


_ORBITS = _orbits()
HELD_OUT: tuple[Task, ...] = tuple(itertools.chain.from_iterable(_ORBITS[:HELD_OUT_ORBITS]))
TRAINED: tuple[tuple[Task, ...], ...] = tuple(tuple(orbit) for orbit in _ORBITS[HELD_OUT_ORBITS:])


def task_of(purpose: str, group: int) -> Task:
    """The task of a group: held-out tasks in turn for "eval", otherwise the trained orbits in ever new orders.

    Four consecutive training groups (from a multiple of four) are one orbit: each word is right once at each turn, so
    that no step pulls the policy towards one word whatever it is told.
    """
    if purpose == "eval":
        return HELD_OUT[group % len(HELD_OUT)]
    orbit, member = divmod(group, len(SYMBOLS))
    epoch, index = divmod(orbit, len(TRAINED))
    chosen = random.Random(f"orbits {epoch}").sample(TRAINED, len(TRAINED))[index]
    return random.Random(f"members {orbit}").sample(chosen, len(chosen))[member]


def reward_of(words: Sequence[str], stopped: bool, wanted: str) -> float:
    """Reward of an answer: its words, and whether it stopped by itself within MAX_TOKENS."""
    if not words:
        return 0.0
    kind = "right" if words[0] == wanted else "of the four" if words[0] in SYMBOLS else "other"
    return FIRST_WORD[kind] + (STOPPED_AFTER_ONE_WORD[kind] if stopped and len(words) == 1 else 0.0)


def prompt_blind() -> float:
    """Mean reward on the held-out tasks of the best policy that knows the turn and the tasks, but reads no prompt."""
    answers = list(itertools.product((*SYMBOLS, "another word"), (True, False)))
    best = [
        max(fmean(reward_of([word], stopped, task[turn]) for task in HELD_OUT) for word, stopped in answers)
        for turn in range(TURNS)
    ]
    return fmean(best)


async def play(rollout: lease.Lease, client: openai.AsyncOpenAI) -> lease.Result:
    messages: list[ChatCompletionMessageParam] = []
    rewards: list[float] = []
    feedback = ""
    for wanted in task_of(rollout.purpose, rollout.group):
        messages.append({"role": "user", "content": f"{feedback}say {wanted}"})
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=MAX_TOKENS)
        choice = answer.choices[0]
        text = choice.message.content or ""
        messages.append({"role": "assistant", "content": text})
        rewards.append(reward_of(text.split(), choice.finish_reason == "stop", wanted))
        feedback = "right " if rewards[-1] == 1.0 else "wrong "
    return lease.Result(per_turn=tuple(rewards))


if __name__ == "__main__":
    if sys.argv[1:] == ["--prompt-blind"]:
        print(json.dumps({"reward_prompt_blind": prompt_blind()}))
    else:
        sys.exit(lease.main(play))
