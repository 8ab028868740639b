"""The collector removes what nothing of a run needs any more, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from segue.blobs import BlobStore
from segue.blobs.retention import JUST_WRITTEN_S, Retention, collect
from segue.events import sample, session, step, turn, work
from segue.events.base import Body, Bulk, Envelope
from segue.events.codec import Recorded, encode_body
from segue.ids import EventId

HOUR_S = 3600.0


class Tape:
    """A log whose clock is set by hand, over a store whose files are old."""

    def __init__(self, folder: Path) -> None:
        self.store, self.retention, self.position = BlobStore(folder), Retention(), 0

    def blob(self, text: str) -> Bulk:
        data = text.encode() * 10_000
        found = Bulk(self.store.put(data), len(data))
        os.utime(self.store.path(found.digest), (0.0, 0.0))
        return found

    def at(self, wall_s: float, *bodies: Body) -> None:
        for body in bodies:
            self.position += 1
            identity = EventId("r", "p", 1, self.position)
            raw = msgspec.Raw(encode_body(body))
            envelope = Envelope(identity, body.SPEC.name, body.SPEC.version, wall_s, 0.0, raw)
            self.retention.apply(Recorded(self.position, envelope, body))

    def left(self, now_wall_s: float, keep_s: float = HOUR_S) -> set[str]:
        collect(self.retention, self.store, now_wall_s, keep_s)
        return {path.name for path in self.store.root.rglob("*") if path.is_file()}


def committed(name: str, rows: Bulk) -> turn.TurnCommitted:
    small = Bulk("0" * 64, 1, b"x")
    return turn.TurnCommitted(
        f"s-{name}", "t1", "", "r1", "d", small, small, ((0, 1, 0),), "stop", 1, 1, 1, "t", "l", rows=rows
    )


def ready(name: str, frame: Bulk, *, purpose: str = "train", group: int = 0) -> sample.SampleReady:
    return sample.SampleReady(
        name, name, f"s-{name}", purpose, group, 0, 0.5, 10, 4, 1, 0, 0, 0, frame, frame.digest
    )  # fmt: skip


def test_a_sessions_blobs_go_after_its_outcome_and_a_frame_after_its_checkpoint(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    rows, frame = tape.blob("rows"), tape.blob("frame")
    tape.at(0.0, committed("a", rows))
    assert tape.left(10 * HOUR_S) == {rows.digest, frame.digest}, "the session is open"
    tape.at(10 * HOUR_S, ready("a", frame))
    assert tape.left(10.5 * HOUR_S) == {rows.digest, frame.digest}, "kept for an hour"
    assert tape.left(11.1 * HOUR_S) == {frame.digest}
    tape.at(12 * HOUR_S, work.GroupCompleted("train", 0, ("a",)), step.StepPlanned(1, 1, ("a",), ("f",), 0))
    assert tape.left(20 * HOUR_S) == {frame.digest}, "a crash would train it again"
    tape.at(20 * HOUR_S, step.CheckpointCommitted(1, 1, 1, "d", "step-1", 0.1))
    assert tape.left(21.1 * HOUR_S) == set()


def test_dropped_groups_evaluations_and_lost_sessions_let_go_too(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    dropped, evaluated, lost = tape.blob("dropped"), tape.blob("evaluated"), tape.blob("lost")
    tape.at(0.0, ready("a", dropped), ready("b", evaluated, purpose="eval"), committed("c", lost))
    assert len(tape.left(5 * HOUR_S)) == 3
    tape.at(
        5 * HOUR_S, work.GroupDropped("train", 0, "failed"), work.GroupCompleted("eval", 0, ("b",)),
        session.SessionExpired("s-c", "deadline"),
    )  # fmt: skip
    assert tape.left(6.1 * HOUR_S) == set()


def test_what_two_refer_to_stays_until_both_let_go(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    shared = tape.blob("shared")
    tape.at(0.0, committed("a", shared), committed("b", shared), session.SessionAbandoned("s-a", "deleted"))
    assert tape.left(5 * HOUR_S) == {shared.digest}
    tape.at(5 * HOUR_S, session.SessionAbandoned("s-b", "deleted"))
    assert tape.left(7 * HOUR_S) == set()


def test_what_was_written_again_just_now_stays(tmp_path: Path) -> None:
    """Its event may be on the way."""
    tape = Tape(tmp_path)
    again = tape.blob("again")
    tape.at(0.0, committed("a", again), session.SessionAbandoned("s-a", "deleted"))
    now = 100 * HOUR_S
    os.utime(tape.store.path(again.digest), (now, now))
    assert tape.left(now + JUST_WRITTEN_S / 2) == {again.digest}


def test_a_collector_that_starts_again_comes_to_the_same(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    gone, held = tape.blob("gone"), tape.blob("held")
    events: tuple[Body, ...] = (committed("a", gone), session.SessionAbandoned("s-a", "x"), committed("b", held))
    tape.at(0.0, *events)
    assert tape.left(5 * HOUR_S) == {held.digest}
    tape.retention = Retention()
    tape.at(0.0, *events)
    assert tape.left(6 * HOUR_S) == {held.digest}
