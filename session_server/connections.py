"""What a connection may cost while nobody reads or writes at its other end.

Invariants: at most `limit` connections are open; one whose client does not take what is written to it for PATIENCE_S
is broken off, whatever is being written; one that brings no whole request header for KEEPALIVE_S is closed. None of
this touches the path of a request that flows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

KEEPALIVE_S = 75.0
PATIENCE_S = 30.0
BACKLOG = 1024
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(slots=True)
class Guard:
    """Counts connections. `refused`: those that were one too many; `broken`: those whose reader had stopped."""

    limit: int
    open: int = 0
    refused: int = 0
    broken: int = 0


class Connection(web.RequestHandler):
    """aiohttp's connection, counted and timed."""

    __slots__ = ("_guard", "_stalled")

    def __init__(self, server: web.Server, guard: Guard, loop: asyncio.AbstractEventLoop) -> None:
        none: Any = None  # aiohttp takes it for "no access log", though its annotation does not say so
        super().__init__(server, loop=loop, keepalive_timeout=KEEPALIVE_S, access_log=none)
        self._guard = guard
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        guard = self._guard
        guard.open += 1
        super().connection_made(transport)
        if guard.open > guard.limit:
            guard.refused += 1
            transport.write(_FULL)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._guard.open -= 1
        self._flows()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._loop.call_later(PATIENCE_S, self._break_off)

    def resume_writing(self) -> None:
        self._flows()
        super().resume_writing()

    def _flows(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _break_off(self) -> None:
        self._stalled = None
        self._guard.broken += 1
        if self.transport is not None:
            self.transport.abort()


async def listen(server: web.Server, guard: Guard, host: str | None, port: int) -> asyncio.Server:
    """Accept connections for `server` under `guard`."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(server, guard, loop), host, port, backlog=BACKLOG)
