"""How much memory sessions may take, and which of their rows leave it first.

Counted are the arrays and texts of committed turns; a session's open turns are bounded by the number of requests.
Invariants: `held_bytes` is the sum of what live sessions hold in memory; beyond `limit_bytes` route rows that can be
read again leave memory, those of the session that has grown longest ago first; what cannot leave is not forgotten: new
sessions wait while the limit is passed, and turns of open ones, which are what would end them, only beyond a further
eighth.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from segue.errors import RequestError

if TYPE_CHECKING:
    from session_server.graph import Node
    from session_server.sessions import Session

LOW_WATER = 0.9
"""Share of the limit down to which rows are dropped at once, so that not every turn has to look for some."""
GRACE = 1.125


class Budget:
    """Of all live sessions of one server."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.spilled_bytes = 0
        """Of live sessions; rows that were dropped from memory."""
        self._by_growth: OrderedDict[str, Session] = OrderedDict()
        """Sessions that may have rows in memory, the one that grew last at the end."""

    @property
    def exceeded(self) -> bool:
        """No new session now."""
        return self.held_bytes > self.limit_bytes

    def check(self) -> None:
        """Raise RequestError 429 if not even turns of open sessions fit."""
        if self.held_bytes > GRACE * self.limit_bytes:
            message = f"sessions hold {self.held_bytes} bytes, the limit is {self.limit_bytes}"
            raise RequestError(429, "rate_limit_error", message)

    def grow(self, session: Session, node: Node, size: int) -> None:
        """`node` of `session` was committed and holds `size` bytes."""
        session.bytes_held += size
        self.held_bytes += size
        if node.rows is not None:
            self._by_growth[session.session_id] = session
            self._by_growth.move_to_end(session.session_id)
        if self.exceeded:
            self._spill()

    def release(self, session: Session) -> None:
        """The session is over."""
        self.held_bytes -= session.bytes_held - session.bytes_spilled
        self.spilled_bytes -= session.bytes_spilled
        self._by_growth.pop(session.session_id, None)

    def _spill(self) -> None:
        target = LOW_WATER * self.limit_bytes
        while self._by_growth and self.held_bytes > target:
            session = next(iter(self._by_growth.values()))
            nodes = session.graph.nodes
            while session.nodes_spilled < len(nodes) and self.held_bytes > target:
                rows = nodes[session.nodes_spilled].rows
                freed = rows.spill() if rows is not None else 0
                session.nodes_spilled += 1
                session.bytes_spilled += freed
                self.spilled_bytes += freed
                self.held_bytes -= freed
            if session.nodes_spilled == len(nodes):
                del self._by_growth[session.session_id]
