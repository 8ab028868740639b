"""Losses by name: `LossInputs` -> `LossOutputs`. One loss is one file; importing this package does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.registry import Registry

if TYPE_CHECKING:
    from training.losses.contract import Loss

LOSSES: Registry[[Mapping[str, float]], Loss] = Registry("loss")


@LOSSES.register("grpo")
def _grpo(options: Mapping[str, float]) -> Loss:
    from training.losses.contract import read_options
    from training.losses.grpo import GrpoLoss, GrpoOptions

    return GrpoLoss(read_options(GrpoOptions, options))


def create(name: str, options: Mapping[str, float]) -> Loss:
    """The loss of this name with its options; unknown names and options raise ConfigError listing the choices."""
    return LOSSES.create(name, options)
