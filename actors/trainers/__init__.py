"""Trainers by name, behind `training.protocol.TrainerProtocol`. Importing this imports neither torch nor ray."""

from __future__ import annotations

from training.protocol import TrainerOptions, TrainerProtocol
from training.registry import Registry

TRAINERS: Registry[[TrainerOptions], TrainerProtocol] = Registry("trainer")


@TRAINERS.register("megatron")
def _megatron(options: TrainerOptions) -> TrainerProtocol:
    from actors.trainers.megatron import create_megatron

    return create_megatron(options)


@TRAINERS.register("fake")
def _fake(options: TrainerOptions) -> TrainerProtocol:
    from actors.trainers.fake import FakeTrainer

    return FakeTrainer(options)


def create(kind: str, options: TrainerOptions) -> TrainerProtocol:
    """The trainer of this kind; an unknown one raises ConfigError listing the choices."""
    return TRAINERS.create(kind, options)
