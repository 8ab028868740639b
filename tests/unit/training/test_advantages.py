"""Advantages in closed form, and what they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from segue.errors import ConfigError, TrainerError
from segue.wire.sample import Sample
from training import advantages

Make = Callable[..., Sample]


def test_group_rewards_are_normalised_within_their_group(make_sample: Make) -> None:
    batch = [make_sample(i, group=f"g{i // 2}", reward=r) for i, r in enumerate([1.0, 3.0, 10.0, 10.0])]
    values = advantages.create("group_normalised")(batch)
    for value, want in zip(values, [-1.0, 1.0, 0.0, 0.0], strict=True):
        assert value.dtype == np.float32
        assert value[5] == pytest.approx(want, abs=1e-5)


def test_centred_advantages_are_not_divided(make_sample: Make) -> None:
    batch = [make_sample(i, reward=r) for i, r in enumerate([1.0, 3.0])]
    assert [v[5] for v in advantages.create("group_centred")(batch)] == [-1.0, 1.0]


@pytest.mark.parametrize("name", advantages.ADVANTAGES.names())
def test_tokens_outside_the_loss_get_zero(make_sample: Make, name: str) -> None:
    batch = [make_sample(i) for i in range(4)]
    for sample, value in zip(batch, advantages.create(name)(batch), strict=True):
        assert (value[sample.loss_mask == 0] == 0).all()
        assert len(value) == len(sample.tokens)


@pytest.mark.parametrize("name", advantages.ADVANTAGES.names())
def test_unanimous_and_single_groups_give_exact_zeros(make_sample: Make, name: str) -> None:
    same = [make_sample(i, reward=0.1, turn_rewards=(0.1, 0.3)) for i in range(3)]
    for value in advantages.create(name)([*same, make_sample(9, group="alone")]):
        assert (value == 0).all()


@pytest.mark.parametrize("name", advantages.ADVANTAGES.names())
def test_the_order_of_samples_does_not_matter(make_sample: Make, name: str) -> None:
    batch = [make_sample(i, group=f"g{i % 3}") for i in range(9)]
    forward, backward = advantages.create(name)(batch), advantages.create(name)(batch[::-1])[::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forward, backward, strict=True))


@pytest.mark.parametrize("name", advantages.ADVANTAGES.names())
def test_a_rollout_cut_into_several_samples_counts_once(make_sample: Make, name: str) -> None:
    first, second = make_sample(0, reward=0.0, turn_rewards=(0.0, 0.0)), make_sample(1, reward=1.0)
    second = dataclasses.replace(second, turn_rewards=np.array([1.0, 1.0], np.float32))
    leaf = dataclasses.replace(second, sample_id="s1b")
    pair, triple = advantages.create(name)([first, second]), advantages.create(name)([first, second, leaf])
    assert np.array_equal(pair[0], triple[0])
    assert np.array_equal(triple[1], triple[2])


def test_each_turn_is_compared_with_the_same_turn_of_its_group(make_sample: Make) -> None:
    batch = [make_sample(0, turn_rewards=(0.0, 5.0)), make_sample(1, turn_rewards=(2.0, 5.0))]
    low, high = advantages.create("per_turn")(batch)
    assert low[4:7] == pytest.approx([-1.0] * 3, abs=1e-5)
    assert high[4:7] == pytest.approx([1.0] * 3, abs=1e-5)
    assert (low[10:13] == 0).all()
    assert (high[10:13] == 0).all()


def test_a_turn_without_its_own_reward_is_refused(make_sample: Make) -> None:
    with pytest.raises(TrainerError, match="turn 1 has no reward"):
        advantages.create("per_turn")([make_sample(turn_rewards=(1.0, float("nan")))])
    with pytest.raises(TrainerError, match="turn 1 has no reward"):
        advantages.create("per_turn")([make_sample(turn_rewards=(1.0,))])


def test_a_reward_that_is_not_finite_is_refused(make_sample: Make) -> None:
    with pytest.raises(TrainerError, match="reward is nan"):
        advantages.create("group_normalised")([make_sample(reward=float("nan"))])


def test_two_rewards_of_one_rollout_are_refused(make_sample: Make) -> None:
    a = make_sample(0, reward=0.0)
    with pytest.raises(TrainerError, match="two rewards"):
        advantages.create("group_normalised")([a, dataclasses.replace(a, sample_id="b", reward=1.0)])


def test_an_unknown_estimator_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="group_normalised, per_turn"):
        advantages.create("gae")
