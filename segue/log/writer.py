"""A producer's pen: numbers its events, commits them in groups, and stops for good when it cannot know what happened.

Group commit: an append starts at once when nothing is in flight; what arrives meanwhile goes together in the next.
An append whose answer was lost is sent again under the same ids until `deadline_s`; then the writer is broken and its
process must start anew (a new epoch fences whatever the old one may have in flight).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from segue.clock import Clock, SystemClock
from segue.errors import FencedError, GapError, LogError, LogUnavailable
from segue.events import codec
from segue.events.base import Body, Envelope
from segue.ids import EventId
from segue.log.protocol import Appended, EventLog, Prepared

MAX_BATCH = 256
RETRY_PAUSE_S = 0.05
STOP_S = 1.0
"""For a flusher that was cancelled: it has nothing left to do but to fail its waiters."""


@dataclass(frozen=True, slots=True)
class Written:
    id: EventId
    position: int
    duplicate: bool


@dataclass(slots=True)
class _Waiting:
    prepared: Prepared
    id: EventId
    done: asyncio.Future[Written]


class Writer:
    """Append events as one producer. Use as `async with await Writer.open(log, "controller") as writer`."""

    def __init__(self, log: EventLog, producer: str, epoch: int, clock: Clock, deadline_s: float) -> None:
        self.log, self.producer, self.epoch, self.clock, self.deadline_s = log, producer, epoch, clock, deadline_s
        self._seq = 0
        self._queue: list[_Waiting] = []
        self._flusher: asyncio.Task[None] | None = None
        self._broken: LogError | None = None

    @classmethod
    async def open(
        cls, log: EventLog, producer: str, *, clock: Clock | None = None, deadline_s: float = 30.0
    ) -> Writer:
        return cls(log, producer, await log.claim(producer), clock or SystemClock(), deadline_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what was submitted, `deadline_s` at most; a writer that was left takes nothing more."""
        if self._flusher is not None:
            await asyncio.wait([self._flusher], timeout=self.deadline_s)
            if not self._flusher.done():
                self._flusher.cancel()
                await asyncio.wait([self._flusher], timeout=STOP_S)
        self._broken = self._broken or LogError(f"the writer {self.producer} epoch {self.epoch} was closed")

    def submit(
        self,
        body: Body,
        *,
        cause: EventId | None = None,
        trace: str | None = None,
        targets: Sequence[str] = (),
        expect: tuple[str, int] | None = None,
    ) -> asyncio.Future[Written]:
        """Queue one event now, in call order; the future resolves when it stands in the log (or raises why not)."""
        done: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            done.set_exception(self._broken)
            return done
        self._seq += 1
        identity = EventId(self.log.run, self.producer, self.epoch, self._seq)
        spec = body.SPEC
        envelope = Envelope(
            identity, spec.name, spec.version, self.clock.wall_s(), self.clock.mono_s(),
            msgspec.Raw(codec.encode_body(body)), cause, trace,
        )  # fmt: skip
        key = body.logical_key()
        prepared = Prepared(
            self.producer, self.epoch, self._seq, codec.encode(envelope), key or "",
            body.identity_digest() if key else "", tuple(targets), expect,
        )  # fmt: skip
        self._queue.append(_Waiting(prepared, identity, done))
        if self._flusher is None or self._flusher.done():
            # The one task outside a TaskGroup: it must outlive the caller that happened to start it, and
            # __aexit__ awaits it.
            self._flusher = asyncio.create_task(self._flush(), name=f"log-writer-{self.producer}")
        return done

    async def append(
        self,
        body: Body,
        *,
        cause: EventId | None = None,
        trace: str | None = None,
        targets: Sequence[str] = (),
        expect: tuple[str, int] | None = None,
    ) -> Written:
        """`submit` and wait. Cancelling the caller does not cancel the append."""
        return await self.submit(body, cause=cause, trace=trace, targets=targets, expect=expect)

    async def _flush(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            try:
                answers = await self._send([w.prepared for w in batch])
            except asyncio.CancelledError:
                self._fail(batch, LogUnavailable(f"the writer {self.producer} was stopped before the log answered"))
                raise
            except Exception as error:
                self._fail(batch, error if isinstance(error, LogError) else LogUnavailable(repr(error)))
                return
            for waiting, answer in zip(batch, answers, strict=True):
                self._settle(waiting, answer)

    async def _send(self, batch: list[Prepared]) -> list[Appended | LogError]:
        deadline = self.clock.mono_s() + self.deadline_s
        while True:
            try:
                return await self.log.append(batch)
            except LogUnavailable:
                if self.clock.mono_s() >= deadline:
                    raise
                await self.clock.sleep(RETRY_PAUSE_S)

    def _settle(self, waiting: _Waiting, answer: Appended | LogError) -> None:
        if isinstance(answer, FencedError | GapError):
            self._broken = answer
        if waiting.done.done():
            return
        if isinstance(answer, LogError):
            waiting.done.set_exception(answer)
        else:
            waiting.done.set_result(Written(waiting.id, answer.position, answer.duplicate))

    def _fail(self, batch: list[_Waiting], error: LogError) -> None:
        self._broken = error
        for waiting in [*batch, *self._queue]:
            if not waiting.done.done():
                waiting.done.set_exception(error)
        self._queue.clear()
