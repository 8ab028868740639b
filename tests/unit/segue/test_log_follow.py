"""Following a log for ever, and the hand-moved clock."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from segue.errors import LogCorruptError, LogUnavailable
from segue.events.codec import Recorded
from segue.log import MemoryLog, follow
from segue.log import follow as follow_module
from segue.testing import ManualClock
from segue.testing.events import Pen
from segue.testing.log_fixtures import LogServer


async def test_it_hands_out_everything_in_order_and_waits_for_more() -> None:
    log = MemoryLog("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare() for _ in range(600)])
    seen: list[int] = []

    async def read() -> None:
        async for event in follow(log, 2):
            seen.append(event.position)
            if event.position == 603:
                return

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    assert seen == list(range(3, 601))
    await log.append([pen.prepare() for _ in range(3)])
    async with asyncio.timeout(5.0):
        await reading
    assert seen == list(range(3, 604))


async def test_a_failing_read_is_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare()])
    failures, pauses = 9, list[float]()

    class Flaky:
        run = log.run

        async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]:
            nonlocal failures
            if failures:
                failures -= 1
                raise LogUnavailable("gone")
            return await log.read(after, limit=limit, wait_s=wait_s)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    import sys

    monkeypatch.setattr(sys.modules["segue.log.follow"].asyncio, "sleep", pause)
    events = follow_module(Flaky())  # type: ignore[arg-type]
    assert (await anext(events)).position == 1
    await events.aclose()  # type: ignore[attr-defined]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_it_goes_on_over_a_restart_of_the_server(tmp_path: Path) -> None:
    own = LogServer(tmp_path, fsync="always")
    try:
        await own.start()
        log = await own.open("run-1")
        pen = Pen("run-1", "w", await log.claim("w"))
        await log.append([pen.prepare()])
        events = follow(await own.open("run-1"), poll_s=20.0)
        assert (await anext(events)).position == 1
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        own.kill()
        await asyncio.sleep(0.1)
        await own.start()
        await (await own.open("run-1")).append([pen.prepare()])
        async with asyncio.timeout(10.0):
            assert (await waiting).position == 2
    finally:
        await own.close_logs()
        own.kill()


@pytest.mark.parametrize("written_again", [0, 3])
async def test_a_log_that_came_back_without_what_was_seen_is_corrupt(tmp_path: Path, written_again: int) -> None:
    own = LogServer(tmp_path, fsync="always")
    try:
        await own.start()
        log = await own.open("run-1")
        pen = Pen("run-1", "w", await log.claim("w"))
        for _ in range(5):
            await log.append([pen.prepare()])
        events = follow(await own.open("run-1"), 3, poll_s=20.0)
        assert [(await anext(events)).position for _ in range(2)] == [4, 5]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        own.kill()
        [file] = (tmp_path / "log" / "aof").glob("*.incr.aof")
        os.truncate(file, file.stat().st_size - 37)
        await own.start()
        if written_again:
            again = await own.open("run-1")
            other = Pen("run-1", "other", await again.claim("other"))
            await again.append([other.prepare() for _ in range(written_again)])
        async with asyncio.timeout(10.0):
            with pytest.raises(LogCorruptError):
                await waiting
    finally:
        await own.close_logs()
        own.kill()


async def test_a_manual_clock_wakes_sleepers_in_order_and_only_when_moved() -> None:
    clock = ManualClock(wall_s=1000.0, mono_s=5.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, *seconds: float) -> None:
        for s in seconds:
            await clock.sleep(s)
            woken.append((name, clock.mono_s()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sleeper("a", 2.0, 2.0))
        tasks.create_task(sleeper("b", 3.0))
        cancelled = tasks.create_task(sleeper("c", 1.0))
        await clock.advance(0.5)
        assert (woken, clock.sleepers) == ([], 3)
        cancelled.cancel()
        await clock.advance(1.5)
        assert (woken, clock.sleepers) == ([("a", 7.0)], 2)
        await clock.advance(10.0)
    assert woken == [("a", 7.0), ("b", 8.0), ("a", 9.0)]
    assert (clock.mono_s(), clock.wall_s()) == (17.0, 1012.0)
