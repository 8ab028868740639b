"""The gate that every engine request passes, and the requests that are at an engine right now.

Invariants: between the close of a pause and EngineResumed of that pause no request starts at the engine concerned; a
turn that was cut goes on after that, a new turn only after the next opening. Passing the gate and entering `running`
happen in one step without an await between them, so whoever closes the gate sees every request that got through.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

Cut = Literal["keep", "drop"]


class Gate:
    """Open at first: a server that was never closed admits turns."""

    def __init__(self) -> None:
        self.pause: int | None = None
        """Number of the pause that closed it, None while it is open."""
        self._usable: set[str] = set()
        self._changed = asyncio.Event()

    def close(self, pause: int) -> None:
        if self.pause != pause:
            self.pause = pause
            self._usable.clear()

    def open(self) -> None:
        self.pause = None
        self._usable.clear()
        self._notify()

    def resumed(self, engine_id: str, pause: int) -> None:
        """The engine runs again after `pause`; an earlier pause's resume says nothing about this one."""
        if self.pause is not None and pause == self.pause:
            self._usable.add(engine_id)
            self._notify()

    def engine_lost(self, engine_id: str) -> None:
        """Whoever waits for it should ask for another."""
        self._usable.discard(engine_id)
        self._notify()

    def admits(self, engine_id: str | None, *, cut: bool) -> bool:
        """May a request start at this engine now (None: at any)? `cut`: its turn was taken off an engine before."""
        if self.pause is None:
            return True
        return cut and (bool(self._usable) if engine_id is None else engine_id in self._usable)

    async def changed(self) -> None:
        """Until something may be admitted that was not; bounded by the caller's deadline."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request at an engine. `settled` is set when its closing fact stands in the log."""

    request_id: str
    engine_id: str
    url: str
    cut: Cut | None = None
    limit: asyncio.Timeout | None = None
    """Rescheduled to now when the engine does not give the request back."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Running:
    """Requests at engines by id."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request: RunningRequest) -> None:
        self._requests[request.request_id] = request

    def settle(self, request: RunningRequest) -> None:
        self._requests.pop(request.request_id, None)
        request.settled.set()

    def all(self) -> list[RunningRequest]:
        return list(self._requests.values())
