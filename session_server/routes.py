"""What a route is: a handler, who may call it, and what it takes and gives. The OpenAPI document is made of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from session_server.server import Server
from session_server.sessions import Session

PlainHandler = Callable[[Server, web.Request], Awaitable[web.StreamResponse]]
SessionHandler = Callable[[Server, web.Request, Session], Awaitable[web.StreamResponse]]
Caller = Literal["anyone", "staff", "worker", "session"]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    caller: whose token it needs (staff: admin or worker). takes: the JSON body's type. gives: the answer's type, or
    its media type. query: the query's type. statuses: those it answers with beside the usual ones of its kind.
    over: status once the session is over; finished_again: a finished session answers with what finish answered.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: PlainHandler | SessionHandler
    caller: Caller
    summary: str
    takes: type | None = None
    gives: type | str | None = None
    query: type | None = None
    statuses: tuple[int, ...] = ()
    streams: bool = False
    over: int = 410
    finished_again: bool = False
