"""Weight transports by name: trainer's tensors -> a receiver at an engine. One transport is one file. Never speaks HTTP
itself: a `Receiver` does. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.registry import Registry

if TYPE_CHECKING:
    from training.weight_sync.protocol import SyncOptions, Transport

TRANSPORTS: Registry[[SyncOptions], Transport] = Registry("weight transport")


@TRANSPORTS.register("tensor")
def _tensor(options: SyncOptions) -> Transport:
    from training.weight_sync.tensor import TensorTransport

    return TensorTransport(options)


@TRANSPORTS.register("disk")
def _disk(options: SyncOptions) -> Transport:
    from training.weight_sync.disk import DiskTransport

    return DiskTransport(options)


def create(name: str, options: SyncOptions) -> Transport:
    """The transport of this name; an unknown one raises ConfigError listing the choices."""
    return TRANSPORTS.create(name, options)


__all__ = ["TRANSPORTS", "create"]
