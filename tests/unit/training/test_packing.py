"""Packing: nothing lost, nothing doubled, the budget kept, every prediction at the right row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import ConfigError, TrainerError
from segue.wire.mask import SamplingMask
from segue.wire.sample import Sample
from training.packing import build_pack, plan_packs

Make = Callable[..., Sample]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_packs_partition_the_samples_within_the_budget(lengths: list[int], budget: int) -> None:
    packs = plan_packs(lengths, budget)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= budget or len(pack) == 1


def test_small_samples_fill_the_room_beside_large_ones() -> None:
    assert plan_packs([5, 9, 1, 4], 10) == [[1, 2], [0, 3]]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        plan_packs([1], 0)


def test_predictions_point_at_the_row_before_their_token(make_sample: Make) -> None:
    samples = [make_sample(0, temperature=0.5), make_sample(1, length=20, turns=((3, 5),), version=4)]
    advantages = [np.full(len(s.tokens), i, np.float32) for i, s in enumerate(samples)]
    kept = [np.ones(len(s.tokens), np.bool_) for s in samples]
    kept[1][4] = False
    pack = build_pack(samples, advantages, kept, [1, 0])
    assert pack.lengths == (20, 14)
    assert pack.samples == (1, 0)
    assert pack.positions.tolist() == [2, 3, *(20 + p - 1 for p in (4, 5, 6, 10, 11, 12))]
    assert np.array_equal(pack.targets, pack.tokens[pack.positions + 1])
    assert pack.mask.tolist() == [True, False] + [True] * 6
    assert pack.datum.tolist() == [0, 0] + [1] * 6
    assert pack.versions.tolist() == [4, 4] + [0] * 6
    assert pack.advantages.tolist() == [1, 1] + [0] * 6
    assert pack.temperatures.tolist() == [1, 1] + [0.5] * 6


def test_a_trained_first_token_is_refused(make_sample: Make) -> None:
    sample = make_sample(turns=((0, 2),))
    with pytest.raises(TrainerError, match="first token"):
        build_pack([sample], [np.zeros(14, np.float32)], [np.ones(14, np.bool_)], [0])


def test_kept_sets_of_supervised_tokens_follow_the_predictions(make_sample: Make) -> None:
    samples = []
    for index in (0, 1):
        sample = make_sample(index)
        kept = [
            [int(t), 60 + i % 3] if m else [int(t)]
            for i, (t, m) in enumerate(zip(sample.tokens, sample.loss_mask, strict=True))
        ]
        samples.append(dataclasses.replace(sample, mask=SamplingMask.of(kept)))
    advantages = [np.zeros(len(s.tokens), np.float32) for s in samples]
    kept_in = [np.ones(len(s.tokens), np.bool_) for s in samples]
    pack = build_pack(samples, advantages, kept_in, [1, 0])
    assert pack.kept is not None
    assert len(pack.kept) == len(pack.targets)
    pack.kept.check(pack.targets.astype(np.int32))
    wanted = [samples[i].mask.support(at).tolist() for i in (1, 0) for at in np.flatnonzero(samples[i].loss_mask)]
    assert [pack.kept.support(row).tolist() for row in range(len(pack.targets))] == wanted
    assert build_pack([make_sample(0)], advantages, kept_in, [0]).kept is None
    with pytest.raises(TrainerError, match="has no sampling mask, others of its batch have"):
        build_pack([samples[0], make_sample(1)], advantages, kept_in, [1, 0])
