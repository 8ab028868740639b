"""Read a log for ever: what every folder of state does.

Invariant: events come out in order of position without a hole, across losses of the server. A server that came back
with less, or with something else at a position already seen, raises LogCorruptError: whoever folded those events holds
a state that the log no longer tells.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from segue.errors import LogCorruptError, LogUnavailable
from segue.events.codec import Recorded
from segue.log.protocol import EventLog

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0

_logger = logging.getLogger(__name__)


async def follow(
    log: EventLog, after: int = 0, *, poll_s: float = 5.0, gather_s: float = 0.0
) -> AsyncIterator[Recorded]:
    """Events with position > `after`, endlessly. `poll_s`: longest single wait at the log; a lost server is waited for.

    `gather_s`: pause between two reads. Under load events come by the hundred a second, and a read for each costs its
    reader more than the events do; a reader that can be late by this much reads them in bunches.

    Raises LogCorruptError if the log went back, LogTrimmedError if `after` lies before what the live log still holds.
    """
    last: Recorded | None = None
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            if last is not None and pause_s != FIRST_PAUSE_S:
                await _recheck(log, last)
            events = await log.read(after, wait_s=poll_s)
        except LogUnavailable as error:
            _logger.warning("the log is away, trying again in %.2f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            continue
        pause_s = FIRST_PAUSE_S
        for event in events:
            yield event
            last, after = event, event.position
        if events and gather_s > 0:
            await asyncio.sleep(gather_s)


async def _recheck(log: EventLog, last: Recorded) -> None:
    """After a loss: is the last event still the one that was seen?"""
    found = await log.read(last.position - 1, limit=1)
    if not found or found[0].envelope != last.envelope:
        raise LogCorruptError(
            f"the log came back without event {last.id} at position {last.position}: it lost acknowledged events"
        )
