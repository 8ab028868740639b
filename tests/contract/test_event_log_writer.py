"""The writer and random interleavings of producers: what a process sees of the log when answers get lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.errors import ConflictError, FencedError, LogError, LogUnavailable, SessionSeqError
from segue.events.run import AlarmRaised
from segue.events.step import StepFinished
from segue.ids import fresh_id
from segue.log import Appended, EventLog, MemoryLog, Prepared, Writer
from segue.log import redis as redis_log
from segue.testing import ManualClock, alarm
from segue.testing.events import Pen
from segue.testing.log_fixtures import LogServer, World, log, log_server, world

__all__ = ["log", "log_server", "world"]  # fixtures


def finished(step: int, *, digest: str = "d1", busy_s: float = 1.0) -> StepFinished:
    return StepFinished(
        lineage=1, step=step, version=step, digest=digest, metrics={"loss": busy_s}, started_wall_s=0.0, busy_s=busy_s
    )


# random interleavings against the log in memory as the model


def operations() -> st.SearchStrategy[list[tuple[str, int, int, int]]]:
    """(what, producer, how many, variant): appends of two producers, repetitions, restarts."""
    kind = st.sampled_from(["append", "append", "keyed", "session", "retry", "restart", "skip", "old"])
    return st.lists(st.tuples(kind, st.integers(0, 1), st.integers(1, 4), st.integers(0, 2)), max_size=25)


class Interleaving:
    """Draws the same batches for both logs; knows nothing of what the answers should be."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.pens = [Pen(run, "a", 0), Pen(run, "b", 0)]
        self.sent: list[list[Prepared]] = [[], []]

    def batch(self, what: str, who: int, count: int, variant: int) -> list[Prepared]:
        pen, sent = self.pens[who], self.sent[who]
        match what:
            case "append":
                made = [pen.prepare() for _ in range(count)]
            case "keyed":
                made = [pen.prepare(finished(i, digest=f"d{variant % 2}"), targets=("t",)) for i in range(count)]
            case "session":
                made = [pen.prepare(expect=(f"s{variant % 2}", i + variant)) for i in range(count)]
            case "retry":
                return sent[-count - variant :][:count]
            case "skip":
                return [pen.prepare(alarm(), seq=pen.seq + 1 + count)]
            case _:
                return [Pen(self.run, pen.producer, pen.epoch - 1).prepare()]
        sent.extend(made)
        return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations())
async def test_any_interleaving_of_two_producers_with_retries_gives_what_the_model_gives(
    log_server: LogServer, steps: Sequence[tuple[str, int, int, int]]
) -> None:
    run = fresh_id("run")
    model, real = MemoryLog(run), await redis_log.connect(log_server.url, run)
    try:
        drawn = Interleaving(run)
        for what, who, count, variant in [("restart", 0, 1, 0), ("restart", 1, 1, 0), *steps]:
            if what == "restart":
                producer = drawn.pens[who].producer
                epoch = await model.claim(producer)
                assert await real.claim(producer) == epoch
                drawn.pens[who], drawn.sent[who] = Pen(run, producer, epoch), []
                continue
            batch = drawn.batch(what, who, count, variant)
            expected, got = await model.append(batch), await real.append(batch)
            assert [(type(a), str(a)) for a in got] == [(type(a), str(a)) for a in expected]
        assert await real.read(0, limit=1000) == await model.read(0, limit=1000)
        assert await real.receive("t", "c", limit=1000) == await model.receive("t", "c", limit=1000)
    finally:
        await real.close()


# the writer


async def test_the_writer_commits_what_arrives_meanwhile_in_one_group(log: EventLog) -> None:
    sizes: list[int] = []

    class Counting:
        run = log.run
        claim = log.claim

        async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
            sizes.append(len(batch))
            await asyncio.sleep(0.02)
            return await log.append(batch)

    async with await Writer.open(Counting(), "w") as writer:  # type: ignore[arg-type]
        first = writer.submit(alarm(detail="0"))
        await asyncio.sleep(0.005)
        rest = [writer.submit(alarm(detail=str(i))) for i in range(1, 10)]
        written = [await future for future in [first, *rest]]
    assert sizes == [1, 9]
    assert [w.position for w in written] == list(range(1, 11))
    details = [e.body.detail for e in await log.read(0) if isinstance(e.body, AlarmRaised)]
    assert details == [str(i) for i in range(10)]


async def test_a_lost_answer_is_repeated_and_changes_nothing(log: EventLog) -> None:
    class Lossy:
        run = log.run
        claim = log.claim
        calls = 0

        async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
            self.calls += 1
            answers = await log.append(batch)
            if self.calls in (1, 3):
                raise LogUnavailable("the answer was lost")
            return answers

    lossy = Lossy()
    async with await Writer.open(lossy, "w") as writer:  # type: ignore[arg-type]
        first = await writer.append(finished(1))
        second = await writer.append(finished(2), targets=("t",))
    assert (first.position, second.position, lossy.calls) == (1, 2, 4)
    assert await log.tail() == 2
    assert len(await log.receive("t", "c")) == 1


async def test_a_fenced_writer_stops_for_good(world: World) -> None:
    old_process, new_process = await world.open(), await world.open()
    async with await Writer.open(old_process, "controller") as old:
        await old.append(alarm())
        async with await Writer.open(new_process, "controller") as new:
            await new.append(alarm())
            with pytest.raises(FencedError):
                await old.append(alarm())
            with pytest.raises(FencedError):
                await old.append(alarm())
            await new.append(alarm())
    assert await new_process.tail() == 3


async def test_a_refused_fact_raises_in_its_own_append_and_the_writer_goes_on(log: EventLog) -> None:
    async with await Writer.open(log, "w") as writer:
        await writer.append(finished(1, digest="d1"))
        refused = writer.submit(finished(1, digest="d2"))
        lost = writer.submit(alarm(), expect=("s", 9))
        good = writer.submit(alarm())
        with pytest.raises(ConflictError):
            await refused
        with pytest.raises(SessionSeqError):
            await lost
        assert (await good).position == 2


async def test_leaving_the_writer_waits_for_what_was_submitted_and_closes_it(log: EventLog) -> None:
    async with await Writer.open(log, "w") as writer:
        futures = [writer.submit(alarm()) for _ in range(600)]
    assert [f.result().position for f in futures] == list(range(1, 601))
    with pytest.raises(LogError, match="closed"):
        await writer.append(alarm())
    assert await log.tail() == 600


async def test_a_log_that_stays_away_breaks_the_writer_at_its_deadline() -> None:
    class Gone:
        run = "run-1"
        calls = 0

        async def claim(self, producer: str) -> int:
            return 1

        async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
            self.calls += 1
            raise LogUnavailable("the server is gone")

    gone, clock = Gone(), ManualClock()
    async with await Writer.open(gone, "w", clock=clock, deadline_s=3.0) as writer:  # type: ignore[arg-type]
        first = writer.submit(alarm())
        await clock.advance(2.9)
        second = writer.submit(alarm())
        assert not first.done()
        await clock.advance(0.2)
        for future in (first, second, writer.submit(alarm())):
            with pytest.raises(LogUnavailable, match="the server is gone"):
                await future
    assert gone.calls > 10


async def test_leaving_a_writer_whose_log_hangs_fails_its_waiters_instead_of_leaving_them() -> None:
    class Hanging:
        run = "run-1"

        async def claim(self, producer: str) -> int:
            return 1

        async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
            await asyncio.Event().wait()
            raise AssertionError

    async with await Writer.open(Hanging(), "w", deadline_s=0.05) as writer:  # type: ignore[arg-type]
        waiting = [writer.submit(alarm()) for _ in range(2)]
        await asyncio.sleep(0.01)
        waiting.append(writer.submit(alarm()))
    for future in waiting:
        with pytest.raises(LogUnavailable, match="stopped before the log answered"):
            await future


async def test_cancelling_the_caller_does_not_cancel_the_append(log: EventLog) -> None:
    async with await Writer.open(log, "w") as writer:
        caller = asyncio.create_task(writer.append(alarm(detail="still there")))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    [event] = await log.read(0)
    assert event.body == alarm(detail="still there")
