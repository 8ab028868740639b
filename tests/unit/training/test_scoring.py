"""Three kinds of tokens are told apart in the comparison of engine and trainer."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_world import make_sample

from training.packing import build_pack
from training.scoring import BatchScore, score_metrics


def test_own_carried_and_older_tokens_are_measured_apart() -> None:
    old = make_sample()
    supervised = np.flatnonzero(old.loss_mask)
    middle = int(supervised[len(supervised) // 2])
    spans = np.array([[0, middle, 3], [middle, len(old.tokens), 4]], np.int32)
    mixed = type(old)(**{name: getattr(old, name) for name in old.__slots__} | {"version_spans": spans})
    fresh_spans = np.array([[0, len(old.tokens), 4]], np.int32)
    fresh = type(old)(**{name: getattr(old, name) for name in old.__slots__} | {"version_spans": fresh_spans})
    ones = [np.ones(len(old.tokens), np.float32)] * 2
    pack = build_pack([mixed, fresh], ones, [np.ones(len(old.tokens), bool)] * 2, (0, 1))
    score = BatchScore()
    wrong = np.where(pack.versions == 3, 0.5, np.where(pack.datum == 0, 0.25, 0.0)).astype(np.float32)
    score.add(pack, pack.behaviour + wrong)
    metrics = score_metrics(score, 4)
    count, older = len(supervised), int((supervised < middle).sum())
    assert metrics["logprob_abs_diff_mean"] == 0.0
    assert metrics["logprob_abs_diff_tokens"] == count
    assert metrics["logprob_abs_diff_mean_carried"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["logprob_abs_diff_tokens_carried"] == count - older
    assert metrics["logprob_abs_diff_mean_older"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["logprob_abs_diff_tokens_older"] == older
