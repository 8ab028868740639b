"""The decision: which engine serves a session, or a request without a session.

Invariants: only an admitted engine that answers its health probe is ever named. A session keeps its engine as long as
that holds; it moves when its engine is lost, torn, draining, behind in version, or excluded by the caller. While
admission is closed no new session is placed and no plain request is let through, but a session that already has an
engine may be moved to another one: its cut turn is carried on before admission opens again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.policies import Candidate, Policy
from router.state import Engine, RouterState
from segue.errors import RequestError


@dataclass(slots=True)
class Assigner:
    """`sick`: engines that fail their health probe. `admission_open`: as the last command said."""

    state: RouterState
    policy: Policy
    sick: set[str] = field(default_factory=set)
    admission_open: bool = False
    plain_in_flight: dict[str, int] = field(default_factory=dict)

    def usable(self, exclude: Collection[str] = ()) -> list[Engine]:
        """Admitted and healthy engines that are not excluded, by id."""
        state = self.state
        return [
            one
            for engine_id, one in sorted(state.engines.items())
            if state.is_admitted(one) and engine_id not in self.sick and engine_id not in exclude
        ]

    def assign(self, session_id: str, exclude: Collection[str] = ()) -> Engine:
        """The session's engine. Raises RequestError (503) if there is none to be had now."""
        usable = self.usable(exclude)
        current = self.state.assigned.get(session_id)
        if current is None and not self.admission_open:
            raise RequestError(503, "admission_closed", "no new session is placed while admission is closed")
        for one in usable:
            if one.engine_id == current:
                return one
        chosen = self._choose(usable)
        self.state.place(session_id, chosen.engine_id)
        return chosen

    @contextmanager
    def plain(self) -> Iterator[Engine]:
        """An engine for one request without a session; counts as load until the block ends."""
        if not self.admission_open:
            raise RequestError(503, "admission_closed", "requests are not served while admission is closed")
        chosen = self._choose([one for one in self.usable() if not one.paused])
        counts = self.plain_in_flight
        counts[chosen.engine_id] = counts.get(chosen.engine_id, 0) + 1
        try:
            yield chosen
        finally:
            counts[chosen.engine_id] -= 1

    def drained(self) -> list[Engine]:
        """Draining engines that no session is assigned to any more, and of which that is not yet recorded."""
        engines = self.state.engines.values()
        return [one for one in engines if one.drain is not None and not one.drained and not one.sessions]

    def _choose(self, usable: list[Engine]) -> Engine:
        if not usable:
            raise RequestError(503, "no_engine", f"no healthy engine holds weight version {self.state.admitted}")
        candidates = [
            Candidate(one.engine_id, len(one.sessions) + self.plain_in_flight.get(one.engine_id, 0)) for one in usable
        ]
        chosen = self.policy.choose(candidates)
        return next(one for one in usable if one.engine_id == chosen)
