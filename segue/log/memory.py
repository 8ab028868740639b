"""The event log in one process's memory: for unit tests and simulations, and the shortest statement of the rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from segue.errors import ConflictError, FencedError, GapError, LogCorruptError, LogError, SessionSeqError
from segue.events import codec
from segue.events.codec import Recorded
from segue.log.protocol import DEDUPE_WINDOW, Appended, Delivery, Prepared


@dataclass(slots=True)
class _Producer:
    epoch: int = 0
    last_seq: int = 0
    seen: dict[int, int | LogError] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    position: int
    consumer: str = ""
    deliveries: int = 0
    since_s: float = 0.0


@dataclass(slots=True)
class _Cursor:
    """What one consumer was given through one view and still holds; `recovering` until older pending ones are out."""

    recovering: bool = True
    handed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Stream:
    positions: list[int] = field(default_factory=list)
    given: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict)
    dead: list[tuple[int, str]] = field(default_factory=list)


class MemoryLog:
    """EventLog in memory. Several "processes" share it by sharing the object; `view()` gives one its own cursors."""

    def __init__(self, run: str, *, mono_s: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._mono_s = mono_s
        self._entries: list[bytes] = []
        self._producers: dict[str, _Producer] = {}
        self._keys: dict[str, tuple[int, str]] = {}
        self._sessions: dict[str, int] = {}
        self._streams: dict[str, _Stream] = {}
        self._cursors: dict[tuple[str, str], _Cursor] = {}
        self._grown = asyncio.Event()

    def view(self) -> MemoryLog:
        """The same log as another process sees it: shared contents, own redelivery state."""
        other = MemoryLog.__new__(MemoryLog)
        other.__dict__.update(self.__dict__)
        other._cursors = {}
        return other

    async def claim(self, producer: str) -> int:
        state = self._producers.setdefault(producer, _Producer())
        state.epoch += 1
        state.last_seq = 0
        state.seen = {}
        return state.epoch

    async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
        return [self._append_one(item) for item in batch]

    def _append_one(self, item: Prepared) -> Appended | LogError:
        producer = self._producers.setdefault(item.producer, _Producer())
        if item.epoch < producer.epoch:
            return FencedError(f"{item.producer} epoch {item.epoch} is older than {producer.epoch}")
        if item.epoch > producer.epoch:
            return GapError(f"{item.producer} epoch {item.epoch} was never claimed")
        if item.seq <= producer.last_seq:
            earlier = producer.seen.get(item.seq, 0)
            return earlier if isinstance(earlier, LogError) else Appended(earlier, True)
        if item.seq != producer.last_seq + 1:
            return GapError(f"{item.producer} epoch {item.epoch}: seq {item.seq} follows {producer.last_seq}")
        outcome = self._judge(item)
        producer.last_seq = item.seq
        producer.seen[item.seq] = outcome if isinstance(outcome, LogError) else outcome.position
        producer.seen.pop(item.seq - DEDUPE_WINDOW, None)
        return outcome

    def _judge(self, item: Prepared) -> Appended | LogError:
        if item.key and item.key in self._keys:
            position, identity = self._keys[item.key]
            if identity != item.identity:
                return ConflictError(f"{item.key} stands at position {position} with another identity")
            return Appended(position, True)
        if item.expect is not None:
            session, expected = item.expect
            have = self._sessions.get(session, 0)
            if have != expected:
                return SessionSeqError(f"session {session} is at {have}, not {expected}")
            self._sessions[session] = expected + 1
        self._entries.append(item.data)
        position = len(self._entries)
        if item.key:
            self._keys[item.key] = (position, item.identity)
        for target in item.targets:
            self._streams.setdefault(target, _Stream()).positions.append(position)
        self._wake()
        return Appended(position, False)

    def _wake(self) -> None:
        self._grown.set()
        self._grown.clear()

    async def _wait(self, ready: Callable[[], bool], wait_s: float) -> None:
        deadline = self._mono_s() + wait_s
        while not ready() and (left := deadline - self._mono_s()) > 0:
            try:
                await asyncio.wait_for(self._grown.wait(), left)
            except TimeoutError:
                return

    async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]:
        if after > len(self._entries):
            raise LogCorruptError(f"read after {after}, but the log ends at {len(self._entries)}")
        await self._wait(lambda: len(self._entries) > after, wait_s)
        return [codec.decode(after + i + 1, data) for i, data in enumerate(self._entries[after : after + limit])]

    async def tail(self) -> int:
        return len(self._entries)

    def event(self, position: int) -> Recorded:
        """The event at a position, for who shares the process with the log."""
        return codec.decode(position, self._entries[position - 1])

    def _hand(self, target: str, pending: _Pending, consumer: str) -> Delivery:
        pending.consumer, pending.since_s = consumer, self._mono_s()
        pending.deliveries += 1
        self._cursors.setdefault((target, consumer), _Cursor()).handed.add(pending.position)
        data = self._entries[pending.position - 1]
        return Delivery(target, codec.decode(pending.position, data), pending.deliveries)

    async def receive(self, target: str, consumer: str, *, limit: int = 16, wait_s: float = 0.0) -> list[Delivery]:
        stream = self._streams.setdefault(target, _Stream())
        cursor = self._cursors.setdefault((target, consumer), _Cursor())
        if cursor.recovering:
            held = (p for p in stream.pending.values() if p.consumer == consumer and p.position not in cursor.handed)
            own = sorted(held, key=lambda p: p.position)[:limit]
            if own:
                return [self._hand(target, p, consumer) for p in own]
            cursor.recovering = False
        await self._wait(lambda: len(stream.positions) > stream.given, wait_s)
        fresh = stream.positions[stream.given : stream.given + limit]
        stream.given += len(fresh)
        for position in fresh:
            stream.pending[position] = _Pending(position)
        return [self._hand(target, stream.pending[p], consumer) for p in fresh]

    async def acknowledge(self, target: str, positions: Sequence[int]) -> None:
        stream = self._streams.setdefault(target, _Stream())
        for position in positions:
            stream.pending.pop(position, None)

    async def touch(self, target: str, consumer: str, positions: Sequence[int]) -> None:
        stream = self._streams.setdefault(target, _Stream())
        for position in positions:
            pending = stream.pending.get(position)
            if pending is not None and pending.consumer == consumer:
                pending.since_s = self._mono_s()

    async def reclaim(self, target: str, consumer: str, *, min_idle_s: float, limit: int = 16) -> list[Delivery]:
        stream = self._streams.setdefault(target, _Stream())
        now = self._mono_s()
        others = (p for p in stream.pending.values() if p.consumer != consumer and now - p.since_s >= min_idle_s)
        idle = sorted(others, key=lambda p: p.position)[:limit]
        return [self._hand(target, p, consumer) for p in idle]

    async def bury(self, target: str, position: int, reason: str) -> None:
        stream = self._streams.setdefault(target, _Stream())
        if stream.pending.pop(position, None) is not None:
            stream.dead.append((position, reason))

    async def buried(self, target: str) -> list[tuple[int, str]]:
        return list(self._streams.setdefault(target, _Stream()).dead)

    async def close(self) -> None:
        self._wake()
