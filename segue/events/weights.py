"""Weights on their way from the trainer to the engines."""

from __future__ import annotations

import msgspec

from segue.events.base import Body, command, fact


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine that takes part in a sync can be reached."""

    engine_id: str
    incarnation: str
    url: str


@command(
    "weights.sync",
    handler="trainer actor",
    key=("sync",),
    follows="WeightsSynced or SyncFailed within the sync deadline",
)
class SyncWeights(Body, frozen=True):
    """Load weight version `version` into `engines`, which are paused and empty (or frozen, in mode in_place)."""

    sync: int
    version: int
    transport: str
    flush_cache: bool
    engines: tuple[EngineAddress, ...]


@fact("weights.sync_begun", emitter="trainer actor", follows="WeightsSynced or SyncFailed")
class SyncBegun(Body, frozen=True):
    sync: int
    version: int
    engines: tuple[str, ...]


@fact("weights.bucket_loaded", emitter="trainer actor")
class BucketLoaded(Body, frozen=True):
    """One bucket reached one engine (sampled: not every bucket is recorded)."""

    sync: int
    engine_id: str
    bucket: int
    bytes: int


@fact("weights.synced", emitter="trainer actor", key=("sync",), identity=("version", "digest"))
class WeightsSynced(Body, frozen=True):
    """Every engine named holds `version`, proved equal by checksum; the router admits it."""

    sync: int
    version: int
    digest: str
    engines: tuple[str, ...]
    bytes: int
    took_s: float
    proved: bool


@fact("weights.sync_failed", emitter="trainer actor", key=("sync",), identity=(), follows="a new sync or EngineLost")
class SyncFailed(Body, frozen=True):
    """`torn`: engines that may hold a part of the new weights."""

    sync: int
    version: int
    reason: str
    torn: tuple[str, ...]
