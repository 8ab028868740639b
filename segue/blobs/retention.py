"""Which blobs of a run nobody needs any more: a fold of the log, and the one collector that acts on it.

A blob is held by what refers to it: the facts of a session until its outcome is recorded, a sample's frame until a
checkpoint covers the step that trained it or its group is dropped, a held-out sample until its group is settled. What
nothing holds is kept for the retention time still (the debugger reads it), then removed. Invariants: the fold alone
decides, so a restarted collector comes to the same; a blob that is held again, or was written again, stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.blobs.store import BlobStore
from segue.events import sample, session, step, work
from segue.events.base import Body, Bulk
from segue.events.codec import Recorded

JUST_WRITTEN_S = 3600.0
"""A file younger than this may belong to an event that is about to be appended."""


@dataclass(slots=True)
class Retention:
    """Apply events in log order; `due` names the blobs that may go."""

    _holders: dict[str, set[str]] = field(default_factory=dict)
    """holder -> digests that it holds."""
    _held: Counter[str] = field(default_factory=Counter)
    _let_go: deque[tuple[float, str]] = field(default_factory=deque)
    """(wall time, digest), oldest first."""
    _trained: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """step -> samples of it that no checkpoint covers."""
    _group: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def apply(self, event: Recorded) -> None:
        body, wall_s = event.body, event.envelope.wall_s
        if body is None:
            return
        holder = _holder(body)
        for digest in _digests(body):
            held = self._holders.setdefault(holder, set())
            if digest not in held:
                held.add(digest)
                self._held[digest] += 1
        match body:
            case sample.SampleReady():
                if body.group >= 0:
                    self._group.setdefault((body.purpose, body.group), []).append(_sample(body.sample_id))
                else:
                    self._release(_sample(body.sample_id), wall_s)
                self._release(_session(body.session_id), wall_s)
            case sample.SampleRejected() | session.SessionAbandoned() | session.SessionExpired():
                self._release(_session(body.session_id), wall_s)
            case work.GroupCompleted():
                holders = self._group.pop((body.purpose, body.group), [])
                for name in holders if body.purpose == "eval" else ():
                    self._release(name, wall_s)
            case work.GroupDropped():
                for name in self._group.pop((body.purpose, body.group), []):
                    self._release(name, wall_s)
            case step.StepPlanned():
                self._trained[body.step] = body.sample_ids
            case step.CheckpointCommitted():
                for number in [n for n in self._trained if n <= body.step]:
                    for name in self._trained.pop(number):
                        self._release(_sample(name), wall_s)
        if holder == "":
            self._release(holder, wall_s)

    def _release(self, holder: str, wall_s: float) -> None:
        for digest in self._holders.pop(holder, ()):
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]
                self._let_go.append((wall_s, digest))

    def due(self, let_go_before_wall_s: float) -> Iterator[str]:
        """Digests that nothing has held since then, each once."""
        while self._let_go and self._let_go[0][0] < let_go_before_wall_s:
            _, digest = self._let_go.popleft()
            if digest not in self._held:
                yield digest


def collect(retention: Retention, store: BlobStore, now_wall_s: float, keep_s: float) -> int:
    """Remove what is due and older than JUST_WRITTEN_S on disk; returns the bytes that became free."""
    return sum(
        store.discard(digest, written_before_wall_s=now_wall_s - JUST_WRITTEN_S)
        for digest in retention.due(now_wall_s - keep_s)
    )


def _session(session_id: str) -> str:
    return f"session {session_id}"


def _sample(sample_id: str) -> str:
    return f"sample {sample_id}"


def _holder(body: Body) -> str:
    """Who holds what an event refers to; "" for nobody beyond the retention time."""
    if isinstance(body, sample.SampleReady):
        return _sample(body.sample_id)
    if isinstance(body, sample.Rescored):
        return ""
    session_id = getattr(body, "session_id", None)
    return _session(session_id) if isinstance(session_id, str) else ""


def _digests(body: Body) -> Iterator[str]:
    """Of the stored bulk bytes that an event refers to; inline ones are in the log itself."""
    for name in _bulk_fields(type(body)):
        found: Any = getattr(body, name)
        if isinstance(found, Bulk) and found.inline is None:
            yield found.digest


_BULK: dict[type[Body], tuple[str, ...]] = {}


def _bulk_fields(kind: type[Body]) -> tuple[str, ...]:
    names = _BULK.get(kind)
    if names is None:
        fields = msgspec.structs.fields(kind)
        names = _BULK[kind] = tuple(f.name for f in fields if f.type in (Bulk, Bulk | None))
    return names
