"""Time as a dependency: processes take a Clock, so that tests and simulations can hand in another one."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def wall_s(self) -> float:
        """Seconds since the epoch; for people and for deadlines that outlive a process."""
        ...

    def mono_s(self) -> float:
        """Monotonic seconds within this process; for durations."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def wall_s(self) -> float:
        return time.time()

    def mono_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
