"""A day of a run in simulated time: slow judges, lost answers, deaths at random; every invariant at every event."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from simulated_run import SPECIES, Habits, SimulatedRun, simulated_config, tiny_model

from debugger.invariants import check
from debugger.replay import replay
from segue.config.schema import Config, Engine, Offload, Rollout, Router, Run
from segue.events import Recorded, run, sample, session, step, turn, work
from segue.log import Writer
from segue.testing.simulation import SimulatedLoop, simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HOUR_S = 3600.0
MODES = ("colocated", "fully_async", "one_step_async")
PAUSES = ("abort", "retract", "in_place", "retract_native")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--simulated-seeds")))


def day_config(model: Path, seed: int) -> Config:
    """Each seed is another combination of mode, pause and partial rollouts."""
    base = simulated_config(model)
    rollout = Rollout(
        mode=MODES[seed % 3], max_staleness=1 + seed % 2, pause_mode=PAUSES[seed // 3 % 4], partial=seed % 5 != 4,
        groups_per_step=8, group_size=4, extra_groups=2, max_turn_tokens=6, max_session_tokens=512,
        lease_s=2 * HOUR_S, turn_deadline_s=HOUR_S, drain_s=30.0, drop_uniform=bool(seed % 2),
    )  # fmt: skip
    colocated = rollout.mode == "colocated" and rollout.pause_mode in ("abort", "retract")
    # A token takes 20 s, so that pauses and deaths find turns half done.
    engine = Engine(kind="fake", fake_token_s=20.0, max_running_requests=64, request_deadline_s=1800.0)
    return msgspec.structs.replace(
        base, run=Run(name="day", steps=10_000, seed=seed), rollout=rollout, engine=engine,
        router=Router(health_interval_s=60.0), offload=base.offload if colocated else Offload(),
    )  # fmt: skip


async def disturb(world: SimulatedRun, seed: int, kills: Counter[str]) -> None:
    """Something dies every 20 minutes, and now and then two things at once."""
    chance = random.Random(seed)
    while True:
        await asyncio.sleep(chance.expovariate(3 / HOUR_S))
        for victim in chance.sample(SPECIES, 2 if chance.random() < 0.2 else 1):
            world.kill(victim)
            kills[victim] += 1


def play_day(folder: Path, config: Config, seed: int, hours: float) -> tuple[list[Recorded], Counter[str]]:
    kills: Counter[str] = Counter()

    async def main(loop: SimulatedLoop) -> list[Recorded]:
        world = SimulatedRun.create(loop, folder, config)
        world.habits = Habits(
            turns=3, concurrency=48, think_s=480.0, forget_p=0.01, forget_s=3 * HOUR_S, lost_p=0.05, seed=seed
        )
        world.start()
        trouble = loop.create_task(disturb(world, seed, kills))
        await asyncio.sleep(hours * HOUR_S)
        trouble.cancel()
        async with await Writer.open(world.log.view(), "supervisor") as writer:
            state_restarts = sum(isinstance(e.body, run.RunResumed) for e in await world.events())
            await writer.append(run.StopRun("the day is over", state_restarts), targets=("supervisor",))
        return await world.finished(HOUR_S)

    return simulate(main), kills


def test_a_day_of_deaths_slow_judges_and_lost_answers_breaks_nothing(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hours = request.config.getoption("--simulated-hours")
    events, kills = play_day(tmp_path / "run", day_config(tiny_model(tmp_path / "model"), seed), seed, hours)
    again = (
        f".venv/bin/python -m pytest tests/integration/{Path(__file__).name} --simulated-hours {hours:g} "
        f'--simulated-seeds {seed + 1} -k "[{seed}]"'
    )
    findings = check(events)
    assert findings == [], f"seed {seed}: {findings[:5]}; again: {again}"
    outcome = replay(events)
    assert outcome.difference is None, f"seed {seed}: {outcome.difference}; again: {again}"
    seen = Counter(type(e.body) for e in events)
    assert seen[run.RunStopped] == 1
    told = {kind.__name__: count for kind, count in seen.items()}
    # What a day holds at least, whatever the seed: the trial must not be passed by standing still.
    assert sum(kills.values()) > 1.5 * hours, told
    assert seen[session.SessionOpened] > 35 * hours, told
    assert seen[turn.TurnCommitted] > 60 * hours, told
    assert seen[sample.SampleReady] > 15 * hours, told
    assert seen[step.StepFinished] > 0.4 * hours, told
    if hours >= 24:
        assert seen[work.RolloutReturned] > 10, told
