"""How the session server writes facts: the writer, plus each session's own counter.

Invariants: facts of one session go out in the order of `expect` numbers, so of two processes that believe they own it
only one gets through, and the other has lost the session for good; an append whose fate is unknown, or a newer epoch of
this producer, ends the process, because what it holds in memory may no longer be what the log says.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from segue.errors import ConflictError, LogError, RequestError, SessionSeqError
from segue.events.base import Body
from segue.events.sample import RewardRecorded
from segue.events.session import SessionAbandoned, SessionExpired, SessionFinished
from segue.events.turn import TurnCommitted
from segue.log.writer import Writer, Written

SEQUENCED = (TurnCommitted, RewardRecorded, SessionFinished, SessionAbandoned, SessionExpired)
"""Facts that carry `expect`. A session's counter is the number of these in the log."""
LOST = -1
"""Counter of a session that another process owns; no log ever counts so, hence nothing gets through any more."""


async def undisturbed[T](shared: asyncio.Future[T]) -> T:
    """Wait for a future that others wait for too: cancelling this wait leaves it alone. What asyncio.shield does, at
    a third of its cost, which a turn pays three times."""
    mine: asyncio.Future[None] = shared.get_loop().create_future()

    def wake(_: asyncio.Future[T]) -> None:
        if not mine.done():
            mine.set_result(None)

    shared.add_done_callback(wake)
    try:
        await mine
    finally:
        shared.remove_done_callback(wake)
    return shared.result()


class Sequenced(Protocol):
    seq: int

    @property
    def session_id(self) -> str: ...


class Facts:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error after which this process cannot go on."""

    @property
    def producer(self) -> str:
        return self._writer.producer

    @property
    def epoch(self) -> int:
        return self._writer.epoch

    def submit(self, body: Body, *, session: Sequenced | None = None) -> asyncio.Future[Written]:
        """Queue a fact now, in call order. `session` numbers it if its kind is numbered."""
        expect = None
        trace = session.session_id if session is not None else None
        if session is not None and isinstance(body, SEQUENCED):
            expect = (session.session_id, session.seq)
            session.seq += session.seq != LOST
        written = self._writer.submit(body, trace=trace, expect=expect)
        written.add_done_callback(lambda done: self._check(done, session))
        return written

    async def append(self, body: Body, *, session: Sequenced | None = None) -> Written:
        """`submit` and wait until it stands in the log; cancelling the caller does not take it back.

        Raises RequestError 503 if another process owns the session by now, ConflictError, or what broke the writer.
        """
        return await self.settled(self.submit(body, session=session))

    async def settled(self, written: asyncio.Future[Written]) -> Written:
        try:
            return written.result() if written.done() else await undisturbed(written)
        except SessionSeqError as error:
            raise RequestError(503, "server_error", f"another process owns this session now: {error}") from error

    def _check(self, written: asyncio.Future[Written], session: Sequenced | None) -> None:
        error = None if written.cancelled() else written.exception()
        if isinstance(error, SessionSeqError) and session is not None:
            session.seq = LOST  # counting on would meet the other owner's counter by chance
        if error is None or isinstance(error, ConflictError | SessionSeqError):
            return
        if isinstance(error, LogError) and not self.broken.done():
            self.broken.set_exception(error)
