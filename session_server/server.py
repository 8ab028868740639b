"""The parts of one session server, and what its handlers share."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from segue.boot import RunContext
from segue.clock import Clock
from segue.events.session import SessionOpened
from segue.ids import fresh_id
from session_server.asks import Asks
from session_server.auth import Tokens, digest_of, new_token
from session_server.dataset import Datasets
from session_server.endings import Endings
from session_server.engine_client import RouterClient
from session_server.facts import Facts
from session_server.families import Generic
from session_server.feed import Feed
from session_server.fold import owner_of
from session_server.liveness import Heart
from session_server.metrics import Metrics
from session_server.pause import Gate, Running
from session_server.sessions import Session, Sessions
from session_server.turns import Turns
from session_server.work import Work


def service_name(index: int) -> str:
    return f"session-{index}"


class Tasks:
    """Starts coroutines in the server's task group; once that is ending, they are dropped."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        try:
            return self._group.create_task(work)
        except RuntimeError:
            work.close()
            raise


@dataclass(frozen=True, slots=True, eq=False)
class Server:
    ctx: RunContext
    index: int
    clock: Clock
    facts: Facts
    http: aiohttp.ClientSession
    router: RouterClient
    sessions: Sessions
    work: Work
    gate: Gate
    running: Running
    family: Generic
    asks: Asks
    turns: Turns
    endings: Endings
    tokens: Tokens
    metrics: Metrics
    feed: Feed
    heart: Heart
    liveness_url: str
    rows: Datasets

    @property
    def service(self) -> str:
        return service_name(self.index)

    @property
    def url(self) -> str:
        return self.ctx.endpoints.session_urls[self.index]

    def owner(self, session_id: str) -> int:
        return owner_of(session_id, self.ctx.config.session_server.count)

    def own_session_id(self) -> str:
        """A fresh id that this server owns."""
        while True:
            session_id = fresh_id("sess")
            if self.owner(session_id) == self.index:
                return session_id

    async def open_session(
        self, opened: SessionOpened, *, deadline_wall_s: float | None = None, lease_attempt: int = -1
    ) -> Session:
        """Record the session; it is live when this returns."""
        written = await self.facts.append(opened)
        now = self.clock.wall_s()
        session = Session(opened, now, now + opened.ttl_s if deadline_wall_s is None else deadline_wall_s)
        session.lease_attempt, session.opened_at = lease_attempt, written.position
        self.sessions.add(session)
        return session

    def session_token(self, session_id: str) -> tuple[str, str]:
        """A token for a session that has none yet, and its digest."""
        token = new_token()
        return token, digest_of(token)


SERVER: web.AppKey[Server] = web.AppKey("server", Server)


def digest_body(kind: str, body: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
