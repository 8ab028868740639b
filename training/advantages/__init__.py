"""Advantage estimators by name: samples -> one float32[n] per sample. Numpy only; one estimator is one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from segue.wire.sample import Sample
from training.registry import Registry

Estimator = Callable[[Sequence[Sample]], list[NDArray[np.float32]]]
"""Advantage of every token of every sample, same order; 0 on tokens with loss_mask 0."""

ADVANTAGES: Registry[[], Estimator] = Registry("advantage")


@ADVANTAGES.register("group_normalised")
def _group_normalised() -> Estimator:
    from training.advantages.group_normalised import group_normalised

    return group_normalised


@ADVANTAGES.register("group_centred")
def _group_centred() -> Estimator:
    from training.advantages.group_normalised import group_centred

    return group_centred


@ADVANTAGES.register("per_turn")
def _per_turn() -> Estimator:
    from training.advantages.per_turn import per_turn

    return per_turn


def create(name: str) -> Estimator:
    """The estimator of this name; an unknown one raises ConfigError listing the choices."""
    return ADVANTAGES.create(name)
