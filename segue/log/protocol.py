"""The event log: one order of all facts and commands of a run, shared by every process.

Promises, the same for every implementation (tests/contract/test_event_log.py runs over all of them):

* Positions are 1, 2, 3, ... without a hole; what was read at a position never changes.
* An append is idempotent by event id (run, producer, epoch, seq). `seq` is contiguous from 1 per (producer, epoch); a
  gap raises GapError. A repetition answers with the position of the first (0 if it is older than the last
  DEDUPE_WINDOW appends of its producer) and `duplicate=True`; a repetition of a refused append is refused again.
* `claim` starts a new epoch of a producer; from then on every older epoch gets FencedError.
* A second fact of one logical key with equal identity is a no-op (`duplicate=True`, position of the first); with
  another identity it raises ConflictError.
* `expect=(session_id, n)` is compared with the session's counter and increments it in the same step; otherwise
  SessionSeqError.
* ConflictError and SessionSeqError consume their seq (the writer goes on with the next), FencedError and GapError
  do not.
* A command with `targets` is added to the stream of each target in the same step as to the log.
* Deliveries of a target stream stay pending until acknowledged, whoever consumed them and however it died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.errors import LogError
from segue.events.codec import Recorded

DEDUPE_WINDOW = 65_536


@dataclass(frozen=True, slots=True)
class Prepared:
    """An encoded event, ready to append. `key` and `identity` are "" where the event declares none."""

    producer: str
    epoch: int
    seq: int
    data: bytes
    key: str = ""
    identity: str = ""
    targets: tuple[str, ...] = ()
    expect: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    position: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Delivery:
    """A command handed to a consumer; `deliveries` counts this one."""

    target: str
    event: Recorded
    deliveries: int


class EventLog(Protocol):
    run: str

    async def claim(self, producer: str) -> int:
        """Start the producer's next epoch (1 for the first) and fence all before it."""
        ...

    async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
        """Append in order, one answer each. Raises LogUnavailable if it is unknown what was appended."""
        ...

    async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]:
        """Events with position > after, in order; waits up to `wait_s` for the first. No group, no state.

        Raises LogCorruptError if `after` lies beyond the end: the log is older than what the reader has seen.
        """
        ...

    async def tail(self) -> int:
        """Position of the last event, 0 if there is none."""
        ...

    async def receive(self, target: str, consumer: str, *, limit: int = 16, wait_s: float = 0.0) -> list[Delivery]:
        """Commands for `target`: this consumer's own pending ones first (after a restart), then new ones.

        A consumer receives each pending command once per `EventLog` object, as pending first, and new ones after;
        `limit` holds for both.
        """
        ...

    async def acknowledge(self, target: str, positions: Sequence[int]) -> None: ...

    async def touch(self, target: str, consumer: str, positions: Sequence[int]) -> None:
        """Keep long-running deliveries from being reclaimed by another consumer."""
        ...

    async def reclaim(self, target: str, consumer: str, *, min_idle_s: float, limit: int = 16) -> list[Delivery]:
        """Take over deliveries that other consumers left idle for `min_idle_s`; `deliveries` is raised by one."""
        ...

    async def bury(self, target: str, position: int, reason: str) -> None:
        """Move a delivery to the target's dead-letter stream and acknowledge it."""
        ...

    async def buried(self, target: str) -> list[tuple[int, str]]:
        """(position, reason) of the target's dead letters, in order."""
        ...

    async def close(self) -> None: ...
