"""From the fold of the log to live sessions, and the repair of what a crash left half done.

Invariant: afterwards every request of this server that was open has its closing fact, every lease that was made
belongs to a live session or is returned, and every session that had ended has all that must follow.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from segue.blobs import BlobStore
from segue.clock import Clock
from segue.config.schema import Config
from segue.errors import EngineError
from segue.events.session import SessionAbandoned, SessionExpired, SessionFinished
from segue.events.turn import TurnDiscarded
from segue.events.work import RolloutReturned
from segue.wire.rows import RowLedger
from session_server import record
from session_server.endings import Endings, finish_tombstone
from session_server.engine_client import EngineClient
from session_server.facts import Facts
from session_server.fold import ServerFold, SessionRecord, is_settled
from session_server.sessions import Session, Sessions, Tombstone

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Restore:
    config: Config
    clock: Clock
    facts: Facts
    blobs: BlobStore
    sessions: Sessions
    engines: EngineClient
    endings: Endings
    empty_rows: RowLedger | None

    async def run(self, fold: ServerFold) -> None:
        await self._close_requests(fold)
        for record_ in list(fold.sessions.values()):
            await self._session(record_, fold)
        for session_id, lease in fold.leases.items():
            if session_id not in fold.sessions:  # reserved, but the session was never opened
                final = fold.work.is_final(lease.attempt)
                await self.facts.append(
                    RolloutReturned(
                        rollout_id=lease.rollout_id, attempt=lease.attempt, reason="server restarted", final=final
                    )
                )
        fold.sessions.clear()

    async def _close_requests(self, fold: ServerFold) -> None:
        requests = list(fold.requests.values())
        async with asyncio.TaskGroup() as group:
            for request in requests:
                url = fold.engine_urls.get(request.engine_id)
                if url is not None and request.engine_id not in fold.paused_engines:
                    group.create_task(self._abort(url, request.request_id))
        for request in requests:
            await self.facts.append(
                TurnDiscarded(
                    session_id=request.session_id, turn_id=request.turn_id, request_id=request.request_id,
                    dropped_tokens=0, reason="server restarted",
                )
            )  # fmt: skip
        fold.requests.clear()

    async def _abort(self, url: str, request_id: str) -> None:
        try:
            await self.engines.abort(url, request_id)
        except EngineError as error:
            _logger.warning("abort of %s: %s", request_id, error)

    async def _session(self, found: SessionRecord, fold: ServerFold) -> None:
        lease_open = found.opened.session_id in fold.leases
        if is_settled(found, lease_open=lease_open):
            self.sessions.bury(found.opened.session_id, _tombstone(found))
            return
        session = await self._live(found)
        if found.ending is None:
            self.sessions.add(session)
            return
        self.sessions.add(session)
        match found.ending:
            case SessionFinished():
                session.ending = "finished"
                if found.outcome is None:
                    await self.endings.conclude(session, found.ending)
                else:
                    await self.endings.received(session, found.outcome, found.ending.status)
            case SessionAbandoned():
                session.ending = "abandoned"
                await self.endings.abandoned(session)
            case SessionExpired():
                session.ending = "expired"
                await self.endings.expired(session)

    async def _live(self, found: SessionRecord) -> Session:
        opened, lease = found.opened, found.lease
        deadline = lease.deadline_wall_s if lease is not None else found.opened_wall_s + opened.ttl_s
        session = Session(
            opened, found.opened_wall_s, deadline, found.seq, found.opened_at, rewards=dict(found.rewards)
        )
        session.lease_attempt = lease.attempt if lease is not None else -1
        comparison = self.config.session_server.comparison
        for fact, wall_s in found.turns:
            node = await record.restore(fact, session.graph, self.blobs, comparison, self.empty_rows, int(wall_s))
            session.graph.add(node)
            self.sessions.budget.grow(session, node, record.node_bytes(node))
        return session


def _tombstone(found: SessionRecord) -> Tombstone:
    digest = found.opened.token_digest
    if isinstance(found.ending, SessionFinished) and found.outcome is not None:
        return finish_tombstone(found.outcome, digest)
    return Tombstone("abandoned" if isinstance(found.ending, SessionAbandoned) else "expired", digest)
