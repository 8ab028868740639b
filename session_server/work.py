"""Rollouts as work: which is leased next. A fold over the facts of all session servers, plus the waiting of leases.

Invariants: a rollout is leased to one session at a time (the log refuses a second reservation of one attempt, whoever
was faster); the lowest (group, member) that is free goes first; a group that was completed or dropped gives no work.
Groups of earlier openings that are not settled stay leasable when their purpose is opened again.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from dataclasses import dataclass, field
from typing import Literal

from segue.events.base import Body
from segue.events.sample import SampleReady, SampleRejected
from segue.events.work import (
    GroupCompleted,
    GroupDropped,
    OpenAdmission,
    RolloutReceived,
    RolloutReserved,
    RolloutReturned,
)

Purpose = Literal["train", "eval"]
PURPOSES: tuple[Purpose, ...] = ("eval", "train")
"""In the order in which they are leased: an evaluation is short and holds others up."""


def rollout_id_of(purpose: str, group: int, member: int) -> str:
    return f"{purpose}-{group}-{member}"


def task_seed(run_seed: int, purpose: str, group: int) -> int:
    """Seed of the group's task, 63 bits: the same for all its members, so that they play the same task."""
    digest = hashlib.sha256(f"{run_seed}|{purpose}|{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class Candidate:
    purpose: Purpose
    group: int
    member: int
    attempt: int

    @property
    def rollout_id(self) -> str:
        return rollout_id_of(self.purpose, self.group, self.member)


@dataclass(slots=True)
class Rollout:
    """`attempt`: number of its last lease; `state`: reserved | returned | done."""

    attempt: int
    state: str
    session_id: str
    worker: str = ""


class _Settled:
    """Group numbers as a lower bound and the few above it: groups settle nearly in order, for weeks."""

    def __init__(self) -> None:
        self._below = 0
        self._above: set[int] = set()

    def add(self, group: int) -> None:
        self._above.add(group)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def __contains__(self, group: int) -> bool:
        return group < self._below or group in self._above


@dataclass(slots=True, eq=False)
class Work:
    max_returns: int
    open_purposes: set[str] = field(default_factory=set)
    _rollouts: dict[tuple[str, int], dict[int, Rollout]] = field(default_factory=dict)
    """Of groups that are not settled: (purpose, group) -> member -> rollout."""
    _sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    _settled: dict[str, _Settled] = field(default_factory=lambda: {purpose: _Settled() for purpose in PURPOSES})
    _free: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {purpose: [] for purpose in PURPOSES})
    """Heaps of (group, member) that may be free; checked when taken."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, command: OpenAdmission) -> None:
        purpose = command.purpose
        self.open_purposes.add(purpose)
        for group in range(command.first_group, command.end_group):
            if group in self._settled[purpose] or (purpose, group) in self._sizes:
                continue
            self._sizes[purpose, group] = command.group_size
            for member in range(command.group_size):
                heapq.heappush(self._free[purpose], (group, member))
        self._notify()

    def close(self) -> None:
        self.open_purposes.clear()

    def next(self) -> Candidate | None:
        """Take the next free rollout out of the pool; the caller reserves it or gives it back with `put_back`."""
        for purpose in PURPOSES:
            if purpose not in self.open_purposes:
                continue
            heap = self._free[purpose]
            while heap:
                group, member = heapq.heappop(heap)
                if (purpose, group) not in self._sizes:
                    continue
                known = self._rollouts.get((purpose, group), {}).get(member)
                if known is None or known.state == "returned":
                    return Candidate(purpose, group, member, known.attempt + 1 if known is not None else 0)
        return None

    def put_back(self, candidate: Candidate) -> None:
        heapq.heappush(self._free[candidate.purpose], (candidate.group, candidate.member))
        self._notify()

    async def changed(self) -> None:
        """Until there may be work that was not; bounded by the caller."""
        await self._changed.wait()

    def rollout(self, purpose: str, group: int, member: int) -> Rollout | None:
        return self._rollouts.get((purpose, group), {}).get(member)

    def reserved(self) -> list[tuple[str, int, int, Rollout]]:
        """Rollouts that are leased now: (purpose, group, member, rollout)."""
        return [
            (purpose, group, member, rollout)
            for (purpose, group), members in self._rollouts.items()
            for member, rollout in members.items()
            if rollout.state == "reserved"
        ]

    def left_behind(self, worker: str) -> list[str]:
        """Sessions leased to an earlier incarnation of this worker (`name/incarnation`): nobody plays them any more."""
        name, mark, _ = worker.rpartition("/")
        if not mark:
            return []
        return [
            rollout.session_id
            for _, _, _, rollout in self.reserved()
            if rollout.worker != worker and rollout.worker.rpartition("/")[0] == name
        ]

    def is_final(self, attempt: int) -> bool:
        """Whether a lease that is returned at this attempt was the last one."""
        return attempt >= self.max_returns

    def apply(self, body: Body) -> None:
        match body:
            case RolloutReserved():
                rollout = Rollout(body.attempt, "reserved", body.session_id, body.worker)
                self._set(body.purpose, body.group, body.member, rollout)
            case RolloutReturned() | RolloutReceived():
                self._ended(body)
            case SampleReady() | SampleRejected():
                known = self.rollout(body.purpose, body.group, body.member)
                if known is not None:
                    known.state = "done"
            case GroupCompleted() | GroupDropped():
                self._settled[body.purpose].add(body.group)
                self._sizes.pop((body.purpose, body.group), None)
                self._rollouts.pop((body.purpose, body.group), None)
            case _:
                pass

    def _ended(self, body: RolloutReturned | RolloutReceived) -> None:
        purpose, group, member = _parse(body.rollout_id)
        known = self.rollout(purpose, group, member) if purpose in PURPOSES else None
        if known is None or known.state == "done":
            return
        if isinstance(body, RolloutReturned) and not body.final:
            if known.attempt == body.attempt:
                known.state = "returned"
                heapq.heappush(self._free[purpose], (group, member))
                self._notify()
        else:
            known.state = "done"

    def _set(self, purpose: str, group: int, member: int, rollout: Rollout) -> None:
        if group not in self._settled[purpose]:
            self._rollouts.setdefault((purpose, group), {})[member] = rollout

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _parse(rollout_id: str) -> tuple[str, int, int]:
    """Parts of a leased rollout's id; ("", -1, -1) for the id of a session without a lease."""
    parts = rollout_id.split("-")
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return parts[0], int(parts[1]), int(parts[2])
    return "", -1, -1
