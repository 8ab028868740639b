"""Live sessions: the graph of committed turns, the turns that are open, and what remains after the end.

Invariants: a session's state changes only after the fact that says so stands in the log; `ending` is set before the
first wait of whatever ends it, so that exactly one ending gets through; after the end a tombstone answers for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from segue.errors import RequestError
from segue.events.sample import RewardRecorded
from segue.events.session import SessionOpened
from segue.log.writer import Written
from session_server.budget import Budget
from session_server.facts import LOST
from session_server.graph import Graph

if TYPE_CHECKING:
    from session_server.attempt import Attempt
    from session_server.engine_client import Assignment

MAX_TOMBSTONES = 100_000


@dataclass(slots=True, eq=False)
class Session:
    opened: SessionOpened
    opened_wall_s: float
    deadline_wall_s: float
    """When it expires unless a turn is open; moved by the time that its turns were held at the gate."""
    seq: int = 0
    opened_at: int = 0
    """Position of its SessionOpened in the log."""
    graph: Graph = field(default_factory=Graph)
    rewards: dict[str, RewardRecorded] = field(default_factory=dict)
    """By key, in order of recording."""
    reward_writes: dict[str, asyncio.Future[Written]] = field(default_factory=dict)
    """By key: the appends of rewards, so that a repetition is not answered before the first is in the log."""
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Turns being generated, by turn id."""
    assignment: Assignment | None = None
    ending: str = ""
    """How it ends, from the moment that this is decided."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_held: int = 0
    """Of its committed turns, wherever they lie."""
    bytes_spilled: int = 0
    """Of these, route rows that are not in memory."""
    nodes_spilled: int = 0
    """So many of the graph's nodes, from the first on, have no rows in memory that could leave it."""
    lease_attempt: int = -1
    """Number of the lease it was opened by, -1 without one."""

    @property
    def session_id(self) -> str:
        return self.opened.session_id

    @property
    def trains(self) -> bool:
        return self.opened.purpose == "train"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is known of a session that is over. `answer`: what finish returned, if it was finished."""

    kind: str
    token_digest: str
    answer: Mapping[str, object] | None = None
    status: int = 200


class Sessions:
    """Sessions of this server by id, and the tombstones of the last MAX_TOMBSTONES."""

    def __init__(self, budget: Budget, max_open: int) -> None:
        self.budget, self._max_open = budget, max_open
        self.live: dict[str, Session] = {}
        self._gone: OrderedDict[str, Tombstone] = OrderedDict()

    @property
    def full(self) -> bool:
        """There is no room for one more."""
        return len(self.live) >= self._max_open or self.budget.exceeded

    def add(self, session: Session) -> None:
        self.live[session.session_id] = session

    def bury(self, session_id: str, tombstone: Tombstone) -> None:
        session = self.live.pop(session_id, None)
        if session is not None:
            self.budget.release(session)
        self._gone[session_id] = tombstone
        while len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        if session is not None:
            session.ended.set()

    def tombstone(self, session_id: str) -> Tombstone | None:
        return self._gone.get(session_id)

    def get(self, session_id: str) -> Session:
        """Raises RequestError 404 for an id that never existed here, 410 for a session that is over."""
        session = self.live.get(session_id)
        if session is not None:
            return session
        gone = self._gone.get(session_id)
        if gone is None:
            raise RequestError(404, "not_found_error", f"there is no session {session_id}")
        raise RequestError(410, "gone_error", f"session {session_id} is over: {gone.kind}")

    def open_for_turns(self, session_id: str) -> Session:
        """`get`, and 409 while the session is ending, 503 if another process owns it by now."""
        session = self.get(session_id)
        if session.seq == LOST:
            raise RequestError(503, "server_error", "another process owns this session now")
        if session.ending:
            raise RequestError(409, "conflict_error", f"session {session_id} is ending: {session.ending}")
        return session
