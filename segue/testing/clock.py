"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools

SETTLE_ROUNDS = 20
"""Turns of the event loop after each wake-up, so that a chain of tasks that the sleeper wakes has run."""


class ManualClock:
    """Clock for tests. `sleep` returns when `advance` has moved the time far enough; nothing else moves it."""

    def __init__(self, *, wall_s: float = 1_700_000_000.0, mono_s: float = 0.0) -> None:
        self._offset_s = wall_s - mono_s
        self._now_s = mono_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def wall_s(self) -> float:
        return self._now_s + self._offset_s

    def mono_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), woken))
        await woken

    @property
    def sleepers(self) -> int:
        """How many tasks wait for this clock."""
        return sum(not woken.done() for _, _, woken in self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move on by `seconds`, waking sleepers in the order of their times and letting each run before the next."""
        until_s = self._now_s + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= until_s:
            at_s, _, woken = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, at_s)
            if not woken.done():
                woken.set_result(None)
                await self._settle()
        self._now_s = until_s

    async def _settle(self) -> None:
        for _ in range(SETTLE_ROUNDS):
            await asyncio.sleep(0)
