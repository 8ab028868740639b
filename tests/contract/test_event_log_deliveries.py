"""Deliveries to the consumers of a target, over the log in memory and over a real server."""

from __future__ import annotations

import asyncio
import time

from segue.errors import LogError
from segue.events.work import CloseAdmission
from segue.log import Appended, EventLog, Prepared
from segue.testing.events import Pen
from segue.testing.log_fixtures import World, log, log_server, world

__all__ = ["log", "log_server", "world"]  # fixtures


async def pen_of(log: EventLog, producer: str = "controller") -> Pen:
    return Pen(log.run, producer, await log.claim(producer))


async def append(log: EventLog, *batch: Prepared) -> list[Appended | LogError]:
    return await log.append(batch)


async def test_a_command_reaches_each_of_its_targets_once(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare(), pen.prepare(CloseAdmission(pause=1), targets=("router", "session-0")))
    for target in ("router", "session-0"):
        [delivery] = await log.receive(target, "c")
        assert (delivery.target, delivery.deliveries) == (target, 1)
        assert (delivery.event.position, delivery.event.body) == (2, CloseAdmission(pause=1))
        assert await log.receive(target, "c") == []
    assert await log.receive("nobody", "c") == []


async def test_commands_sent_before_the_first_consumer_came_are_delivered(world: World) -> None:
    writer, consumer = await world.open(), await world.open()
    pen = await pen_of(writer)
    await append(writer, *[pen.prepare(CloseAdmission(pause=i), targets=("router",)) for i in range(3)])
    assert [d.event.position for d in await consumer.receive("router", "r1")] == [1, 2, 3]


async def test_two_consumers_of_a_target_share_its_commands(world: World) -> None:
    one, two = await world.open(), await world.open()
    pen = await pen_of(one)
    await append(one, *[pen.prepare(CloseAdmission(pause=i), targets=("t",)) for i in range(4)])
    first, second = await one.receive("t", "c1", limit=2), await two.receive("t", "c2", limit=8)
    assert [d.event.position for d in first] == [1, 2]
    assert [d.event.position for d in second] == [3, 4]


async def test_a_waiting_consumer_wakes_when_a_command_comes(world: World) -> None:
    consumer, writer = await world.open(), await world.open()
    pen = await pen_of(writer)
    async with asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(consumer.receive("t", "c", wait_s=20.0))
        await asyncio.sleep(0.05)
        await append(writer, pen.prepare(CloseAdmission(pause=1), targets=("t",)))
    assert [d.event.position for d in receiving.result()] == [1]
    started = time.monotonic()
    assert await consumer.receive("t", "c", wait_s=0.1) == []
    assert 0.09 <= time.monotonic() - started < 5.0


async def test_after_a_restart_a_consumer_gets_its_own_pending_first_then_new_ones(world: World) -> None:
    before, writer = await world.open(), await world.open()
    pen = await pen_of(writer)
    await append(writer, *[pen.prepare(CloseAdmission(pause=i), targets=("t",)) for i in range(4)])
    assert len(await before.receive("t", "c", limit=3)) == 3
    await before.acknowledge("t", [2])
    after = await world.open()
    again = await after.receive("t", "c")
    assert [(d.event.position, d.deliveries) for d in again] == [(1, 2), (3, 2)]
    assert [(d.event.position, d.deliveries) for d in await after.receive("t", "c")] == [(4, 1)]
    assert await after.receive("t", "c") == []


async def test_the_limit_holds_for_pending_commands_too(world: World) -> None:
    before, after = await world.open(), await world.open()
    pen = await pen_of(before)
    await append(before, *[pen.prepare(CloseAdmission(pause=i), targets=("t",)) for i in range(5)])
    assert len(await before.receive("t", "c")) == 5
    given = [await after.receive("t", "c", limit=2) for _ in range(4)]
    assert [[d.event.position for d in batch] for batch in given] == [[1, 2], [3, 4], [5], []]
    assert {d.deliveries for batch in given for d in batch} == {2}


async def test_an_acknowledged_command_never_comes_again(world: World) -> None:
    before, after = await world.open(), await world.open()
    pen = await pen_of(before)
    await append(before, pen.prepare(CloseAdmission(pause=1), targets=("t",)))
    await before.receive("t", "c")
    await before.acknowledge("t", [1])
    await before.acknowledge("t", [1])
    await before.acknowledge("t", [])
    assert await after.receive("t", "c") == []
    assert await after.reclaim("t", "other", min_idle_s=0.0) == []


async def test_commands_of_a_dead_consumer_are_reclaimed_and_counted(world: World) -> None:
    dead, living = await world.open(), await world.open()
    pen = await pen_of(dead)
    await append(dead, *[pen.prepare(CloseAdmission(pause=i), targets=("t",)) for i in range(3)])
    await dead.receive("t", "dead")
    assert await living.receive("t", "living") == []
    taken = await living.reclaim("t", "living", min_idle_s=0.0, limit=2)
    assert [(d.event.position, d.deliveries, d.event.body) for d in taken] == [
        (1, 2, CloseAdmission(pause=0)), (2, 2, CloseAdmission(pause=1)),
    ]  # fmt: skip
    assert [d.event.position for d in await living.reclaim("t", "living", min_idle_s=0.0)] == [3]
    assert await living.receive("t", "living") == []
    await living.acknowledge("t", [1, 2, 3])
    assert await (await world.open()).reclaim("t", "third", min_idle_s=0.0) == []


async def test_what_is_not_idle_long_enough_is_left_alone(world: World) -> None:
    holder, taker = await world.open(), await world.open()
    pen = await pen_of(holder)
    await append(holder, *[pen.prepare(CloseAdmission(pause=i), targets=("t",)) for i in range(2)])
    await holder.receive("t", "holder")
    assert await taker.reclaim("t", "taker", min_idle_s=30.0) == []
    await asyncio.sleep(0.3)
    await holder.touch("t", "holder", [2])
    assert [d.event.position for d in await taker.reclaim("t", "taker", min_idle_s=0.25)] == [1]


async def test_a_consumer_does_not_reclaim_its_own_slow_deliveries(log: EventLog) -> None:
    pen = await pen_of(log)
    await append(log, pen.prepare(CloseAdmission(pause=1), targets=("t",)))
    await log.receive("t", "c")
    assert await log.reclaim("t", "c", min_idle_s=0.0) == []


async def test_touch_neither_counts_a_delivery_nor_takes_it_back(world: World) -> None:
    slow, quick = await world.open(), await world.open()
    pen = await pen_of(slow)
    await append(slow, pen.prepare(CloseAdmission(pause=1), targets=("t",)))
    await slow.receive("t", "slow")
    await slow.touch("t", "slow", [1])
    [taken] = await quick.reclaim("t", "quick", min_idle_s=0.0)
    assert taken.deliveries == 2
    await slow.touch("t", "slow", [1])
    again = await (await world.open()).receive("t", "quick")
    assert [(d.event.position, d.deliveries) for d in again] == [(1, 3)]


async def test_a_buried_command_is_a_dead_letter_once_and_pends_no_more(world: World) -> None:
    log, other = await world.open(), await world.open()
    pen = await pen_of(log)
    await append(log, *[pen.prepare(CloseAdmission(pause=i), targets=("t",)) for i in range(3)])
    await log.receive("t", "c", limit=2)
    await log.bury("t", 2, "five deliveries, the last: boom")
    await log.bury("t", 2, "again")
    await log.bury("t", 1, "also")
    await log.bury("t", 3, "was never delivered")
    assert await other.buried("t") == [(2, "five deliveries, the last: boom"), (1, "also")]
    assert await other.buried("elsewhere") == []
    assert [d.event.position for d in await other.receive("t", "c")] == [3]


async def test_a_delivery_that_kills_its_consumers_counts_up_to_the_dead_letter(world: World) -> None:
    pen = await pen_of(await world.open())
    await append(await world.open(), pen.prepare(CloseAdmission(pause=1), targets=("t",)))
    for attempt in range(1, 5):
        process = await world.open()
        [delivery] = await process.receive("t", "c")
        assert delivery.deliveries == attempt
    await process.bury("t", 1, "poison")
    assert await (await world.open()).receive("t", "c") == []


async def test_thousands_of_pending_commands_are_taken_over_at_once(world: World) -> None:
    dead, living = await world.open(), await world.open()
    pen = await pen_of(dead)
    await append(dead, *[pen.prepare(targets=("t",)) for _ in range(9001)])
    assert len(await dead.receive("t", "dead", limit=10_000)) == 9001
    taken = await living.reclaim("t", "living", min_idle_s=0.0, limit=9000)
    assert [d.event.position for d in taken] == list(range(1, 9001))
    assert [d.event.position for d in await living.reclaim("t", "living", min_idle_s=0.0, limit=9000)] == [9001]
