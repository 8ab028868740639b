"""Every promise of segue.log.protocol, over the log in memory and over a real server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from segue.errors import (
    ConflictError,
    FencedError,
    GapError,
    LogCorruptError,
    LogError,
    SessionSeqError,
)
from segue.events.run import RunStarted
from segue.events.step import StepFinished
from segue.events.work import CloseAdmission
from segue.ids import EventId
from segue.log import Appended, EventLog, FileLog, Prepared, seal
from segue.log import protocol as log_protocol
from segue.log import redis as redis_log
from segue.testing import alarm
from segue.testing.events import Pen, prepare
from segue.testing.log_fixtures import World, log, log_server, world

__all__ = ["log", "log_server", "world"]  # fixtures


async def pen_of(log: EventLog, producer: str = "controller") -> Pen:
    return Pen(log.run, producer, await log.claim(producer))


async def append(log: EventLog, *batch: Prepared) -> list[Appended | LogError]:
    return await log.append(batch)


def finished(step: int, *, digest: str = "d1", busy_s: float = 1.0) -> StepFinished:
    return StepFinished(
        lineage=1, step=step, version=step, digest=digest, metrics={"loss": busy_s}, started_wall_s=0.0, busy_s=busy_s
    )


# positions and reading


async def test_positions_count_from_one_without_a_hole_over_all_producers(log: EventLog) -> None:
    a, b = await pen_of(log, "a"), await pen_of(log, "b")
    assert await append(log, a.prepare(), a.prepare()) == [Appended(1, False), Appended(2, False)]
    assert await append(log, b.prepare()) == [Appended(3, False)]
    assert await append(log, a.prepare(), b.prepare()) == [Appended(4, False), Appended(5, False)]
    assert await log.tail() == 5
    assert [e.position for e in await log.read(0)] == [1, 2, 3, 4, 5]


async def test_an_empty_log_has_tail_zero_and_nothing_to_read(log: EventLog) -> None:
    assert await log.tail() == 0
    assert await log.read(0) == []
    assert await log.append([]) == []


async def test_what_is_read_is_what_was_appended(log: EventLog) -> None:
    event_id = EventId(log.run, "controller", await log.claim("controller"), 1)
    body = alarm(detail='text with "quotes", \n a newline, \u00e9 and a nul \x00')
    await append(log, prepare(event_id, body, wall_s=12.25))
    [event] = await log.read(0)
    assert (event.position, event.id, event.body) == (1, event_id, body)
    assert (event.envelope.type, event.envelope.version, event.envelope.wall_s) == ("run.alarm", 1, 12.25)


async def test_reading_goes_on_after_a_position_and_keeps_to_its_limit(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, *[pen.prepare() for _ in range(7)])
    assert [e.position for e in await log.read(0, limit=3)] == [1, 2, 3]
    assert [e.position for e in await log.read(3, limit=3)] == [4, 5, 6]
    assert [e.position for e in await log.read(6)] == [7]
    assert await log.read(7) == []


async def test_two_readers_read_the_same(world: World) -> None:
    first, second = await world.open(), await world.open()
    pen = await pen_of(first)
    await append(first, *[pen.prepare() for _ in range(5)])
    assert await first.read(0) == await second.read(0)
    assert len(await first.read(0)) == 5


async def test_a_waiting_reader_wakes_when_something_is_appended(world: World) -> None:
    reader, writer = await world.open(), await world.open()
    pen = await pen_of(writer)
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(reader.read(0, wait_s=20.0))
        await asyncio.sleep(0.05)
        await append(writer, pen.prepare())
    assert [e.position for e in reading.result()] == [1]
    assert time.monotonic() - started < 10.0


async def test_a_reader_that_waits_in_vain_returns_nothing_after_its_time(log: EventLog) -> None:
    started = time.monotonic()
    assert await log.read(0, wait_s=0.1) == []
    assert 0.09 <= time.monotonic() - started < 5.0


@pytest.mark.slow
async def test_a_reader_waits_as_long_as_it_was_told(world: World) -> None:
    reader, writer = await world.open(), await world.open()
    pen = await pen_of(writer)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(reader.read(0, wait_s=30.0))
        receiving = tasks.create_task(reader.receive("t", "c", wait_s=30.0))
        await asyncio.sleep(7.0)
        await append(writer, pen.prepare(targets=("t",)))
    assert [e.position for e in reading.result()] == [1]
    assert [d.event.position for d in receiving.result()] == [1]


async def test_a_blocked_reader_does_not_delay_an_append_of_the_same_process(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare())
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(log.read(1, wait_s=20.0))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await append(log, pen.prepare())
        assert time.monotonic() - started < 5.0
    assert [e.position for e in reading.result()] == [2]


async def test_reading_after_the_end_says_that_the_log_went_back(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare())
    with pytest.raises(LogCorruptError, match="ends at 1"):
        await log.read(2)
    with pytest.raises(LogCorruptError):
        await log.read(2, wait_s=0.05)


# idempotence and fencing


async def test_a_repeated_append_answers_with_the_first_position_and_adds_nothing(world: World) -> None:
    log, other = await world.open(), await world.open()
    pen = await pen_of(log)
    batch = [pen.prepare() for _ in range(3)]
    await append(log, *batch)
    assert await append(other, *batch) == [Appended(1, True), Appended(2, True), Appended(3, True)]
    assert await append(log, batch[1]) == [Appended(2, True)]
    assert await log.tail() == 3


async def test_one_event_twice_in_one_batch_stands_once(log: EventLog) -> None:
    pen = await pen_of(log)
    item = pen.prepare()
    assert await append(log, item, item, pen.prepare()) == [Appended(1, False), Appended(1, True), Appended(2, False)]


async def test_a_batch_whose_answer_was_lost_is_completed_by_its_repetition(log: EventLog) -> None:
    pen = await pen_of(log)
    batch = [pen.prepare() for _ in range(4)]
    await append(log, *batch[:2])
    assert await append(log, *batch) == [
        Appended(1, True), Appended(2, True), Appended(3, False), Appended(4, False),
    ]  # fmt: skip


async def test_a_gap_in_seq_is_refused_and_does_not_consume_the_seq(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare())
    [answer] = await append(log, pen.prepare(seq=3))
    assert isinstance(answer, GapError)
    assert "seq 3 follows 1" in str(answer)
    assert await append(log, pen.prepare(seq=2), pen.prepare(seq=3)) == [Appended(2, False), Appended(3, False)]


async def test_a_gap_inside_a_batch_refuses_everything_after_it(log: EventLog) -> None:
    pen = await pen_of(log)
    answers = await append(log, pen.prepare(seq=1), pen.prepare(seq=3), pen.prepare(seq=4))
    assert answers[0] == Appended(1, False)
    assert [type(a) for a in answers[1:]] == [GapError, GapError]
    assert await log.tail() == 1


async def test_epochs_count_up_and_each_starts_at_seq_one(log: EventLog) -> None:
    first, other = await pen_of(log), await pen_of(log, "router")
    await append(log, first.prepare(), first.prepare())
    second = await pen_of(log)
    assert (first.epoch, second.epoch, other.epoch) == (1, 2, 1)
    [answer] = await append(log, second.prepare(seq=3))
    assert isinstance(answer, GapError)
    assert await append(log, second.prepare(seq=1)) == [Appended(3, False)]


async def test_an_older_epoch_is_fenced_even_for_what_it_repeats(world: World) -> None:
    old_process, new_process = await world.open(), await world.open()
    old = await pen_of(old_process)
    item = old.prepare()
    await append(old_process, item)
    new = await pen_of(new_process)
    assert [type(a) for a in await append(old_process, item, old.prepare())] == [FencedError, FencedError]
    assert await append(new_process, new.prepare()) == [Appended(2, False)]


async def test_an_epoch_that_was_never_claimed_is_refused(log: EventLog) -> None:
    [answer] = await append(log, Pen(log.run, "controller", 1).prepare())
    assert isinstance(answer, GapError)
    assert "never claimed" in str(answer)
    assert await log.tail() == 0


async def test_a_repetition_older_than_the_window_is_known_without_its_position(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (log_protocol, redis_log, __import__("segue.log.memory", fromlist=["memory"])):
        monkeypatch.setattr(module, "DEDUPE_WINDOW", 10)
    log = await world.open()
    pen = await pen_of(log)
    items = [pen.prepare() for _ in range(33)]
    for start in range(0, 33, 7):  # batches that wrap around the window
        await append(log, *items[start : start + 7])
    answers = await append(log, *items)
    assert answers[:23] == [Appended(0, True)] * 23
    assert answers[23:] == [Appended(position, True) for position in range(24, 34)]


async def test_the_window_is_as_long_as_promised(world: World) -> None:
    assert log_protocol.DEDUPE_WINDOW == 65_536
    log = await world.open()
    data = (await pen_of(log)).prepare().data
    items = [Prepared("controller", 1, seq, data) for seq in range(1, 65_536 + 3)]
    assert (await log.append(items))[-1] == Appended(65_538, False)
    assert await append(log, items[1]) == [Appended(0, True)]
    assert await append(log, items[2], items[-1]) == [Appended(3, True), Appended(65_538, True)]


# logical keys and sessions


async def test_a_second_fact_of_a_key_with_equal_identity_is_a_no_op_whoever_appends_it(log: EventLog) -> None:
    a, b = await pen_of(log, "a"), await pen_of(log, "b")
    await append(log, a.prepare(), a.prepare(finished(7, busy_s=1.0)))
    assert await append(log, b.prepare(finished(7, busy_s=99.0))) == [Appended(2, True)]
    assert await append(log, b.prepare(finished(8))) == [Appended(3, False)]
    [_, standing, _] = await log.read(0)
    assert standing.body == finished(7, busy_s=1.0)


async def test_a_second_fact_of_a_key_with_another_identity_is_refused_but_consumes_its_seq(log: EventLog) -> None:
    a, b = await pen_of(log, "a"), await pen_of(log, "b")
    await append(log, a.prepare(finished(7, digest="d1")))
    refused = b.prepare(finished(7, digest="d2"))
    [answer] = await append(log, refused)
    assert isinstance(answer, ConflictError)
    assert "stands at position 1" in str(answer)
    assert await append(log, b.prepare()) == [Appended(2, False)]
    [again] = await append(log, refused)
    assert isinstance(again, ConflictError)
    assert await log.tail() == 2


async def test_a_no_op_is_remembered_like_an_append(log: EventLog) -> None:
    a, b = await pen_of(log, "a"), await pen_of(log, "b")
    await append(log, a.prepare(finished(7)))
    repeated = b.prepare(finished(7))
    assert await append(log, repeated) == [Appended(1, True)]
    assert await append(log, repeated, b.prepare()) == [Appended(1, True), Appended(2, False)]


async def test_a_key_holds_across_epochs(log: EventLog) -> None:
    before = await pen_of(log)
    await append(log, before.prepare(CloseAdmission(pause=3)))
    after_crash = await pen_of(log)
    assert await append(log, after_crash.prepare(CloseAdmission(pause=3), targets=("router",))) == [Appended(1, True)]
    assert await log.receive("router", "r1") == []


async def test_session_appends_go_one_after_the_other(log: EventLog) -> None:
    pen = await pen_of(log)
    assert await append(log, pen.prepare(expect=("s1", 0)), pen.prepare(expect=("s1", 1))) == [
        Appended(1, False), Appended(2, False),
    ]  # fmt: skip
    assert await append(log, pen.prepare(expect=("s2", 0))) == [Appended(3, False)]


async def test_a_process_that_lost_the_session_is_refused_and_its_writer_goes_on(world: World) -> None:
    ours, theirs = await world.open(), await world.open()
    a, b = await pen_of(ours, "session-0"), await pen_of(theirs, "session-1")
    await append(ours, a.prepare(expect=("s1", 0)))
    await append(theirs, b.prepare(expect=("s1", 1)))
    refused = a.prepare(expect=("s1", 1))
    [answer] = await append(ours, refused)
    assert isinstance(answer, SessionSeqError)
    assert "is at 2, not 1" in str(answer)
    assert await append(ours, a.prepare()) == [Appended(3, False)]
    await append(theirs, b.prepare(expect=("s1", 2)))
    [again] = await append(ours, refused)
    assert isinstance(again, SessionSeqError)


async def test_a_refused_session_append_leaves_key_and_counter_free(log: EventLog) -> None:
    pen = await pen_of(log)
    [answer] = await append(log, pen.prepare(finished(1), expect=("s1", 5)))
    assert isinstance(answer, SessionSeqError)
    assert await append(log, pen.prepare(finished(1, digest="other"), expect=("s1", 0))) == [Appended(1, False)]


async def test_a_duplicate_by_key_leaves_the_session_counter(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare(finished(1), expect=("s1", 0)))
    assert await append(log, pen.prepare(finished(1), expect=("s1", 0))) == [Appended(1, True)]
    assert await append(log, pen.prepare(expect=("s1", 1))) == [Appended(2, False)]


# sealed files read like the log they came from


async def test_sealed_segments_read_exactly_like_their_log(log: EventLog, tmp_path: Path) -> None:
    pen = await pen_of(log)
    await append(
        log,
        pen.prepare(
            RunStarted(
                run_id=log.run,
                config="{}",
                config_digest="c",
                decide_version=1,
                lineage=1,
                session_servers=1,
                engines=(),
            )
        ),
        *[pen.prepare() for _ in range(30)],
        pen.prepare(CloseAdmission(pause=1), targets=("t",)),
    )
    assert await seal(log, tmp_path, size=10) == 32
    sealed = FileLog(tmp_path)
    assert (sealed.run, await sealed.tail()) == (log.run, 32)
    for after, limit in [(0, 512), (0, 3), (9, 2), (10, 512), (25, 4), (31, 512), (32, 512)]:
        live, filed = await log.read(after, limit=limit), await sealed.read(after, limit=limit)
        assert filed == live[: len(filed)]
        assert bool(filed) == bool(live)
    read, position = [], 0
    while events := await sealed.read(position):
        read += events
        position = events[-1].position
    assert read == await log.read(0)
    with pytest.raises(LogCorruptError, match="ends at 32"):
        await sealed.read(33)


async def test_a_sealed_log_takes_no_appends(log: EventLog, tmp_path: Path) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare())
    await seal(log, tmp_path)
    sealed = FileLog(tmp_path)
    for refused in (
        sealed.claim("w"),
        sealed.append([pen.prepare()]),
        sealed.receive("t", "c"),
        sealed.acknowledge("t", [1]),
        sealed.touch("t", "c", [1]),
        sealed.reclaim("t", "c", min_idle_s=0.0),
        sealed.bury("t", 1, "r"),
        sealed.buried("t"),
    ):
        with pytest.raises(LogError, match="sealed"):
            await refused
