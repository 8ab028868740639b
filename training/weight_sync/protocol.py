"""The two sides of a weight sync, and its options and report. Torch-free.

Invariants every transport keeps:
- All tensors are checked against the manifest (names, shapes, dtypes, finite values) before the receiver is touched.
- `begin` is followed by exactly one `end`, also when a load fails; an error after `begin` is a TornSyncError: the
  receiver holds a mixture and must be loaded whole before it serves again.
- The version is published (`set_version`) only after everything was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from segue.errors import ConfigError, TrainerError

Manifest = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype as torch spells it, shape): what a complete set of weights looks like."""


class WeightCheckError(TrainerError):
    """The tensors at the source are not what the manifest promises; nothing was sent."""


class TornSyncError(TrainerError):
    """A sync failed half way: the receiver's weights are a mixture of two versions."""

    retryable = True


class ChecksumError(TrainerError):
    """The receiver's weights differ from the trainer's after a sync that claimed success."""


class Receiver(Protocol):
    """One engine, as a weight sync sees it. Every method raises EngineError if the engine refuses."""

    async def begin(self) -> None:
        """Open a weight update; weights may only be loaded inside one."""
        ...

    async def load_tensors(
        self, serialized: bytes, *, load_format: str | None, version: int, flush_cache: bool
    ) -> None:
        """Load one bucket. serialized: a plain pickle of what `load_format` says; flush_cache: drop cached prefixes."""
        ...

    async def load_disk(self, path: str, *, version: int, flush_cache: bool) -> None:
        """Load a whole model folder that the engine can read."""
        ...

    async def end(self) -> None:
        """Close the update; the engine finishes derived weights."""
        ...

    async def set_version(self, version: int) -> None:
        """Publish the version that answers will carry."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Engine's own parameter name -> checksum, as `checksums.expected_checksums` computes them."""
        ...


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """bucket_bytes: soft size of one message. folder, source, keep: for `disk`: where model folders are written, where
    config and tokenizer files come from, and how many written versions stay. load_timeout_s bounds each load."""

    bucket_bytes: int = 512 * 1024 * 1024
    folder: Path | None = None
    source: Path | None = None
    keep: int = 2
    load_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.keep < 1 or self.load_timeout_s <= 0:
            raise ConfigError(f"bucket_bytes, keep and load_timeout_s must be positive: {self}")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What was sent. digest: the trainer's hash of the weights; sent_bytes: counted once, however many receivers."""

    version: int
    digest: str
    sent_bytes: int
    buckets: int
    seconds: float


class Transport(Protocol):
    """Moves one version of the weights to one or more receivers."""

    async def sync(
        self,
        tensors: Iterable[tuple[str, Any]],
        receivers: tuple[Receiver, ...],
        *,
        version: int,
        manifest: Manifest,
        flush_cache: bool = True,
    ) -> SyncReport:
        """flush_cache=False keeps the engine's prefix cache (an engine frozen with running requests needs that)."""
        ...
