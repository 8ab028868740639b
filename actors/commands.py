"""How an actor works through its command stream: one at a time, acknowledged when the effect is durable.

Deliveries left over by an earlier incarnation come first. A command that was delivered too often is buried and that is
a fact; everything else about it is the handler's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from segue.errors import LogUnavailable
from segue.events import run
from segue.log import Delivery, EventLog, Writer

log = logging.getLogger("actors.commands")
MAX_DELIVERIES = 5
WAIT_S = 5.0
TOUCH_S = 10.0


class CommandStream:
    """The commands for one target. Iterate it, handle, then `done(delivery)` (or leave it pending on purpose)."""

    def __init__(self, events: EventLog, writer: Writer, target: str, consumer: str) -> None:
        self.events, self.writer, self.target, self.consumer = events, writer, target, consumer

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            try:
                batch = await self.events.receive(self.target, self.consumer, limit=16, wait_s=WAIT_S)
            except LogUnavailable as error:
                log.warning("%s: %s", self.target, error)
                await asyncio.sleep(WAIT_S)
                continue
            for delivery in batch:
                if await self._deliverable(delivery):
                    yield delivery

    async def _deliverable(self, delivery: Delivery) -> bool:
        if delivery.event.body is None:
            await self._bury(delivery, f"this build does not know {delivery.event.envelope.type}")
            return False
        return True

    async def give_up(self, delivery: Delivery, reason: str) -> bool:
        """Bury a command that keeps failing; False while it may still be tried again."""
        if delivery.deliveries < MAX_DELIVERIES:
            return False
        await self._bury(delivery, reason)
        return True

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        position = delivery.event.position
        fact = run.CommandDeadLettered(position, self.target, delivery.deliveries, reason)
        await self.writer.append(fact, cause=delivery.event.id)
        await self.events.bury(self.target, position, reason)

    async def done(self, delivery: Delivery) -> None:
        await self.events.acknowledge(self.target, [delivery.event.position])

    @contextlib.asynccontextmanager
    async def kept(self, delivery: Delivery) -> AsyncIterator[None]:
        """Keep a long-running delivery from being taken over while its handler works."""

        async def touch() -> None:
            while True:
                await asyncio.sleep(TOUCH_S)
                with contextlib.suppress(LogUnavailable):
                    await self.events.touch(self.target, self.consumer, [delivery.event.position])

        # Not a TaskGroup: that would wrap the handler's own error into an exception group.
        keeper = asyncio.create_task(touch(), name=f"keep-{self.target}-{delivery.event.position}")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])
