"""Every trainer keeps the same promises: the fake one and the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from trainer_world import make_sample, write_model

from actors import trainers
from segue.errors import ConfigError, TrainerError
from segue.wire.sample import Sample
from training.protocol import TrainerOptions, TrainerProtocol

Make = Callable[..., TrainerProtocol]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer") / "model"


@pytest.fixture(params=["fake", pytest.param("megatron", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, model_folder: Path) -> Make:
    """make(**options) -> a trainer of the kind under test."""
    kind: str = request.param
    if kind == "megatron" and not model_folder.exists():
        write_model(model_folder, "qwen3_moe")

    def create(**changes: object) -> TrainerProtocol:
        options = {"lr": 1e-3, "epochs": 2, "replay_routes": True, "seed": 3} | changes
        return trainers.create(kind, TrainerOptions(model_folder, **options))  # type: ignore[arg-type]

    return create


def batch(number: int = 0) -> list[Sample]:
    return [make_sample(10 * number + i, group=f"g{i // 4}", layers=2) for i in range(8)]


def test_a_step_names_the_next_version_and_the_digest_of_the_new_weights(make: Make) -> None:
    trainer = make()
    before = trainer.digest()
    result = trainer.step(batch(), step=1, version=0, seed=5)
    assert (result.step, result.version, trainer.version) == (1, 1, 1)
    assert result.digest == trainer.digest() != before


def test_equal_state_samples_and_seed_give_an_equal_digest(make: Make) -> None:
    digests = {make().step(batch(), step=1, version=0, seed=5).digest for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize("part", ["tokens", "logprobs", "turn_rewards", "samples", "state"])
def test_every_part_of_the_input_decides_the_outcome(make: Make, part: str) -> None:
    options = {"advantage": "per_turn"}
    samples = batch()
    straight = make(**options).step(samples, step=1, version=0, seed=5).digest
    trainer = make(**options)
    match part:
        case "tokens":
            samples[0] = dataclasses.replace(samples[0], tokens=(samples[0].tokens + 1) % 64)
        case "logprobs":
            samples[0] = dataclasses.replace(samples[0], logprobs=samples[0].logprobs * np.float32(0.99))
        case "turn_rewards":
            samples[0] = dataclasses.replace(samples[0], turn_rewards=samples[0].turn_rewards + np.float32(1))
        case "samples":
            samples = samples[:4]
        case _:
            trainer.step(batch(1), step=0, version=0, seed=5)
    assert trainer.step(samples, step=1, version=trainer.version, seed=5).digest != straight


def test_resuming_is_bit_equal_to_never_stopping(make: Make, tmp_path: Path) -> None:
    straight = make()
    digests = [straight.step(batch(n), step=n, version=n, seed=n).digest for n in range(3)]
    stopped = make()
    stopped.step(batch(0), step=0, version=0, seed=0)
    saved = stopped.save(tmp_path / "step-0", step=0, cursor="17-0")
    resumed = make(seed=99)
    assert resumed.load(tmp_path / "step-0") == saved
    assert (saved.step, saved.version, saved.cursor, saved.digest) == (0, 1, "17-0", digests[0])
    assert resumed.version == 1
    assert resumed.digest() == digests[0]
    assert [resumed.step(batch(n), step=n, version=n, seed=n).digest for n in (1, 2)] == digests[1:]


def test_saving_does_not_disturb_training(make: Make, tmp_path: Path) -> None:
    plain, saving = make(), make()
    for n in range(2):
        saving.save(tmp_path / f"step-{n}", step=n, cursor="")
        expected = plain.step(batch(n), step=n, version=n, seed=n)
        assert saving.step(batch(n), step=n, version=n, seed=n).digest == expected.digest


def test_a_version_may_run_ahead_but_never_back(make: Make) -> None:
    trainer = make()
    assert trainer.step(batch(), step=1, version=6, seed=0).version == 7
    with pytest.raises(TrainerError, match="version 3"):
        trainer.step(batch(), step=2, version=3, seed=0)
    assert trainer.version == 7


def test_an_empty_batch_is_refused_and_changes_nothing(make: Make) -> None:
    trainer = make()
    before = trainer.digest()
    with pytest.raises(TrainerError, match="at least one sample"):
        trainer.step([], step=1, version=0, seed=0)
    assert (trainer.digest(), trainer.version) == (before, 0)


def test_named_tensors_are_complete_unique_and_what_the_digest_covers(make: Make) -> None:
    trainer = make()
    names = [name for name, _ in trainer.named_tensors()]
    assert names
    assert len(set(names)) == len(names)
    before = {name: np.asarray(tensor).copy() for name, tensor in trainer.named_tensors()}
    trainer.step(batch(), step=1, version=0, seed=0)
    after = dict(trainer.named_tensors())
    assert any(not np.array_equal(before[name], np.asarray(after[name])) for name in names)


def test_a_damaged_or_foreign_checkpoint_is_refused(make: Make, tmp_path: Path) -> None:
    trainer = make()
    trainer.save(tmp_path / "c", step=0, cursor="")
    (data,) = (p for p in (tmp_path / "c").iterdir() if p.name != "manifest.json")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(TrainerError, match="damaged"):
        trainer.load(tmp_path / "c")
    with pytest.raises(TrainerError, match="not a complete checkpoint"):
        trainer.load(tmp_path / "nowhere")


def test_metrics_are_plain_finite_numbers_under_common_names(make: Make) -> None:
    metrics = make().step(batch(), step=1, version=0, seed=0).metrics
    common = {"loss", "reward_mean", "grad_norm", "clip_fraction", "approx_kl", "entropy", "tokens", "tokens_total"}
    common |= {"rows_replayed", "rows_absent", "rows_recomputed", "logprob_abs_diff_mean", "logprob_abs_diff_max"}
    assert common <= metrics.keys()
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    assert metrics["reward_mean"] == pytest.approx(np.mean([s.reward for s in batch()]))


def test_unknown_kinds_and_impossible_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fake, megatron"):
        trainers.create("torch", TrainerOptions(tmp_path))
    with pytest.raises(ConfigError, match="epochs"):
        TrainerOptions(tmp_path, epochs=0)
