"""Whole runs in simulated time, a process killed at an event: whoever dies, the run ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from simulated_run import SPECIES, SimulatedRun, simulated_config, tiny_model

from actors import trainers
from actors.trainers.fake import FakeTrainer
from debugger.invariants import check
from debugger.replay import replay
from segue.blobs import BlobStore
from segue.config.schema import Checkpoint, Config, Run
from segue.events import Recorded, run, sample, step, weights
from segue.testing.simulation import SimulatedLoop, simulate
from segue.wire.sample import Sample, sample_from_frame
from training.protocol import StepResult, TrainerOptions

EVERY = 23
"""Events between two kills of one kind in `make test`; `--every-event` kills at each."""


@dataclass(frozen=True, slots=True)
class Result:
    """What must not depend on who died: the samples, array for array, and the weights after each step."""

    samples: dict[str, tuple[bytes, ...]]
    weights: dict[int, str]
    rewards: dict[str, float]
    events: list[Recorded]


def play(folder: Path, config: Config, victim: str = "", at: int = 0) -> Result:
    """A run from start to end; `victim` is killed right after event `at` was appended."""

    async def main(loop: SimulatedLoop) -> list[Recorded]:
        world = SimulatedRun.create(loop, folder, config)

        def on_event(position: int) -> None:
            if position == at and victim:
                world.kill(victim)

        world.on_event = on_event
        world.start()
        return await world.finished()

    events = simulate(main)
    blobs = BlobStore(folder / "blobs")
    ready = [e.body for e in events if isinstance(e.body, sample.SampleReady)]
    return Result(
        {body.rollout_id: _arrays(blobs.get(body.frame_digest)) for body in ready},
        {e.body.step: e.body.digest for e in events if isinstance(e.body, step.StepFinished)},
        {body.rollout_id: body.reward for body in ready},
        events,
    )


def _arrays(frame: bytes) -> tuple[bytes, ...]:
    made = sample_from_frame(frame)
    arrays = (made.tokens, made.loss_mask, made.logprobs, made.version_spans, made.turn_index, made.routes)
    return tuple(b"" if array is None else np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("simulated") / "model")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = play(tmp_path_factory.mktemp("undisturbed"), simulated_config(model))
    assert check(result.events) == []
    assert len(result.samples) == 2 * 2 * 2 + 2
    return result


def test_a_simulated_run_repeats_itself(model: Path, undisturbed: Result, tmp_path: Path) -> None:
    again = play(tmp_path, simulated_config(model))
    assert [e.envelope.type for e in again.events] == [e.envelope.type for e in undisturbed.events]
    assert (again.samples, again.weights) == (undisturbed.samples, undisturbed.weights)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", SPECIES)
def test_whoever_dies_at_whatever_event_the_run_ends_the_same(
    victim: str, model: Path, undisturbed: Result, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stride = 1 if request.config.getoption("--every-event") else EVERY
    first = 1 + SPECIES.index(victim) * stride // len(SPECIES)
    for at in range(first, len(undisturbed.events), stride):
        result = play(tmp_path / str(at), simulated_config(model), victim, at)
        told = f"{victim} killed at event {at} ({undisturbed.events[at - 1].envelope.type})"
        assert check(result.events) == [], told
        assert result.rewards == undisturbed.rewards, told
        assert result.samples == undisturbed.samples, told
        assert result.weights == undisturbed.weights, told
        assert replay(result.events).difference is None, told


class InexactTrainer(FakeTrainer):
    """Gives slightly other weights each time a process starts, as an accelerator may."""

    starts = 0

    def __init__(self, options: TrainerOptions) -> None:
        super().__init__(options)
        InexactTrainer.starts += 1
        self.drift = np.float32(1e-3 * InexactTrainer.starts)

    def step(self, samples: Sequence[Sample], *, step: int, version: int, seed: int) -> StepResult:
        result = super().step(samples, step=step, version=version, seed=seed)
        self._state = self._state + self.drift
        return dataclasses.replace(result, digest=self.digest())


def test_weights_that_come_out_otherwise_start_a_new_lineage(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "create", lambda kind, options: InexactTrainer(options))
    base = simulated_config(model)
    config = msgspec.structs.replace(base, run=Run(name="sim", steps=4), checkpoint=Checkpoint(every=10))

    async def main(loop: SimulatedLoop) -> list[Recorded]:
        world = SimulatedRun.create(loop, tmp_path, config)
        finished = 0

        def on_event(position: int) -> None:
            nonlocal finished
            body = world.log.event(position).body
            finished += isinstance(body, weights.WeightsSynced)
            if isinstance(body, weights.WeightsSynced) and finished == 2:
                world.kill("trainer")

        world.on_event = on_event
        world.start()
        return await world.finished()

    events = simulate(main)
    (raised,) = [e.body for e in events if isinstance(e.body, run.LineageRaised)]
    assert (raised.lineage, raised.abandoned_steps, raised.first_version) == (2, (1, 2), 3)
    done = [(e.body.lineage, e.body.step, e.body.version) for e in events if isinstance(e.body, step.StepFinished)]
    assert done == [(1, 1, 1), (1, 2, 2), (2, 1, 3), (2, 2, 4), (2, 3, 5), (2, 4, 6)]
    synced = [e.body.version for e in events if isinstance(e.body, weights.WeightsSynced)]
    assert synced == [1, 2, 4, 5, 6], "engines hold the surviving weights before they sample again"
    assert check(events) == []
    assert replay(events).difference is None
