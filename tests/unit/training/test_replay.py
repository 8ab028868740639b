"""Routing replay: which rows are used, which tokens leave the loss, what is refused. The model side is in
test_megatron_trainer.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from segue.errors import TrainerError
from segue.wire.sample import ROW_ABSENT, ROW_RECOMPUTED, Sample
from training.replay import RouteTable, pack_routes, sample_routes

Make = Callable[..., Sample]
TABLE = RouteTable(layers=(1, 2), all_layers=3, experts=4, top_k=2)


def marked(sample: Sample, **rows: int) -> Sample:
    assert sample.routes_provenance is not None
    provenance = sample.routes_provenance.copy()
    for row, kind in rows.items():
        provenance[int(row[1:])] = kind
    return dataclasses.replace(sample, routes_provenance=provenance)


def test_rows_are_the_sparse_layers_columns_of_the_engines_rows(make_sample: Make) -> None:
    sample = make_sample(layers=3)
    routes = sample_routes(sample, TABLE, "mask_loss")
    assert sample.routes is not None
    assert np.array_equal(routes.rows[:-1], sample.routes[:, [1, 2]])
    assert routes.absent.tolist() == [False] * 13 + [True], "the last token was never fed"
    assert routes.kept.all()
    assert (routes.replayed, routes.recomputed) == (13, 0)


def test_what_is_predicted_from_an_absent_row_leaves_the_loss(make_sample: Make) -> None:
    routes = sample_routes(marked(make_sample(layers=3), r5=ROW_ABSENT), TABLE, "replay")
    assert np.flatnonzero(~routes.kept).tolist() == [6]
    assert np.flatnonzero(routes.absent).tolist() == [5, 13]
    assert routes.replayed == 12


@pytest.mark.parametrize(("policy", "dropped"), [("mask_loss", [5, 6]), ("replay", [])])
def test_recomputed_rows_are_replayed_and_leave_the_loss_by_policy(
    make_sample: Make, policy: str, dropped: list[int]
) -> None:
    sample = marked(make_sample(layers=3), r4=ROW_RECOMPUTED, r5=ROW_RECOMPUTED)
    routes = sample_routes(sample, TABLE, policy)  # type: ignore[arg-type]
    assert np.flatnonzero(~routes.kept).tolist() == dropped
    assert (routes.replayed, routes.recomputed) == (13, 2)


def test_every_packed_row_is_valid_and_fillers_are_spread(make_sample: Make) -> None:
    samples = [marked(make_sample(i, layers=3), **{f"r{row}": ROW_ABSENT for row in range(13)}) for i in range(4)]
    rows = pack_routes([sample_routes(s, TABLE, "mask_loss") for s in samples], TABLE)
    assert rows.shape == (2, 56, 2)
    assert rows.dtype == np.int64
    assert ((rows >= 0) & (rows < TABLE.experts)).all()
    assert (rows[..., 0] != rows[..., 1]).all()
    counts = np.bincount(rows[0].reshape(-1), minlength=TABLE.experts)
    assert counts.max() - counts.min() <= 1


def test_packed_rows_follow_the_order_of_the_samples(make_sample: Make) -> None:
    routes = [sample_routes(make_sample(i, layers=3), TABLE, "mask_loss") for i in range(2)]
    rows = pack_routes(routes, TABLE)
    assert np.array_equal(rows[:, 14:27], routes[1].rows[:-1].transpose(1, 0, 2))


def test_rows_that_do_not_fit_are_refused(make_sample: Make) -> None:
    sample = make_sample(layers=3)
    assert sample.routes is not None
    wrong = {
        "carries no routes": dataclasses.replace(sample, routes=None, routes_provenance=None),
        "the model needs": dataclasses.replace(sample, routes=sample.routes[:-1]),
        "names expert 9 of 4": dataclasses.replace(sample, routes=np.full_like(sample.routes, 9)),
        "names one expert twice": dataclasses.replace(sample, routes=np.ones_like(sample.routes)),
    }
    for message, bad in wrong.items():
        with pytest.raises(TrainerError, match=message):
            sample_routes(bad, TABLE, "mask_loss")
