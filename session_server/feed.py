"""What happens to one session, read from the log and told as it comes.

Invariants: only events that stand in the log are told, each once and in the order of their positions, which are their
ids; a listener that falls MAX_BEHIND events behind is let go (it asks again from the last id that it has), so nobody
waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from segue.errors import LogTrimmedError
from segue.events.codec import Recorded
from segue.log import EventLog
from segue.log.reader import open_reader

MAX_BEHIND = 1024
IDLE_S = 15.0
READ_LIMIT = 256
"""Events decoded at a time while somebody catches up: about as long as one turn takes."""


async def history(log: EventLog, run_dir: Path, after: int, end: int, limit: int) -> AsyncGenerator[Recorded]:
    """Events after position `after` up to `end`, from sealed segments where the log no longer has them."""
    try:
        while after < end:
            for event in await log.read(after, limit=limit):
                yield event
                after = event.position
    except LogTrimmedError:
        reader = await open_reader(run_dir)
        try:
            while after < end:
                for event in await reader.read(after, limit=limit):
                    yield event
                    after = event.position
        finally:
            await reader.close()


@dataclass(slots=True, eq=False)
class Listener:
    """`lost`: it was too slow, and is told nothing more."""

    pending: deque[Recorded] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False


@dataclass(slots=True, eq=False)
class Feed:
    """`position`: of the last event that this server has read."""

    log: EventLog
    run_dir: Path
    position: int
    _listeners: dict[str, list[Listener]] = field(default_factory=dict)

    def tell(self, event: Recorded) -> None:
        """Hand on an event that was read from the log. Called in the order of positions."""
        self.position = event.position
        if not self._listeners:
            return
        session_id = session_of(event)
        for listener in self._listeners.get(session_id, ()) if session_id is not None else ():
            listener.lost = listener.lost or len(listener.pending) >= MAX_BEHIND
            if not listener.lost:
                listener.pending.append(event)
            listener.changed.set()

    async def listen(self, session_id: str, after: int) -> AsyncGenerator[Recorded | None]:
        """The session's events after position `after`, for ever; None whenever all that is known was told, and at
        least every IDLE_S. Ends when the listener is too slow."""
        listener = Listener()
        self._listeners.setdefault(session_id, []).append(listener)
        try:
            joined = max(self.position, await self.log.tail())  # what is still on its way here is told from the log
            async for event in history(self.log, self.run_dir, after, joined, READ_LIMIT):
                if after < event.position <= joined and session_of(event) == session_id:
                    yield event
            while not listener.lost:
                listener.changed.clear()
                while listener.pending:
                    event = listener.pending.popleft()
                    if event.position > joined:
                        yield event
                yield None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await listener.changed.wait()
        finally:
            left = self._listeners[session_id]
            left.remove(listener)
            if not left:
                del self._listeners[session_id]


def session_of(event: Recorded) -> str | None:
    """The session that an event speaks of."""
    found = getattr(event.body, "session_id", None)
    return found if isinstance(found, str) else None
