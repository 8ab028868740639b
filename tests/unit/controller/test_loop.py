"""The controller's shell over a log in memory: what a restart finds and what it says first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from controller.loop import Loop, Pace
from segue.boot import Endpoints, RunContext
from segue.config.schema import Config
from segue.events import Recorded, codec, run, step
from segue.events.base import Body, Envelope
from segue.ids import EventId
from segue.log import MemoryLog, Writer


def context(start_id: str) -> RunContext:
    endpoints = Endpoints("", "", (), "", "", "", "", start_id)
    return RunContext("r", Path("/nowhere"), Config(), endpoints)


async def start(log: MemoryLog, start_id: str) -> None:
    """A controller until it has announced itself and come to rest."""
    async with await Writer.open(log, "controller") as writer:
        loop = asyncio.create_task(Loop(context(start_id), log, writer).run())
        await asyncio.sleep(0.05)
        assert not loop.done()
        loop.cancel()
        await asyncio.wait([loop])


async def test_a_run_that_was_stopped_goes_on_when_it_is_started_again() -> None:
    log = MemoryLog("r")
    await start(log, "first")
    async with await Writer.open(log, "controller") as writer:
        await writer.append(run.RunStopped("interrupted"))
    await start(log, "second")
    bodies = [event.body for event in await log.read(0)]
    assert [type(body) for body in bodies] == [run.RunStarted, run.RunStopped, run.RunResumed]


async def test_a_restart_knows_whether_it_alone_is_new() -> None:
    log = MemoryLog("r")
    await start(log, "first")
    await start(log, "first")
    await start(log, "second")
    resumed = [e.body for e in await log.read(0) if isinstance(e.body, run.RunResumed)]
    assert [(body.whole, body.restart) for body in resumed] == [(False, 1), (True, 2)]


def test_a_step_that_takes_much_longer_than_usual_is_told_once() -> None:
    pace = Pace()
    for number in range(6):
        pace.apply(at(100.0 * number, step.StepFinished(1, number + 1, number + 1, "d", {}, 0.0, 0.0)))
    assert pace.usual_s == 100.0
    assert pace.late_s(500.0 + 499.0, 300.0) == 0.0
    assert pace.late_s(500.0 + 501.0, 600.0) == 0.0, "run.stall_s is the least"
    assert pace.late_s(500.0 + 601.0, 600.0) == 601.0
    assert pace.late_s(500.0 + 700.0, 600.0) == 0.0, "told already"
    pace.apply(at(1300.0, step.StepFinished(1, 7, 7, "d", {}, 0.0, 0.0)))
    assert pace.late_s(1300.0 + 601.0, 600.0) == 601.0


def test_too_few_steps_have_no_usual_time_and_a_resume_begins_anew() -> None:
    pace = Pace()
    for number in range(3):
        pace.apply(at(10.0 * number, step.StepFinished(1, number + 1, number + 1, "d", {}, 0.0, 0.0)))
    assert pace.late_s(1e6, 1.0) == 0.0
    pace.apply(at(40.0, step.StepFinished(1, 4, 4, "d", {}, 0.0, 0.0)))
    assert pace.usual_s == 10.0
    pace.apply(at(41.0, run.RunResumed("r", "{}", "d", 2, 1, 1, True)))
    assert pace.late_s(1e6, 1.0) == 0.0


def at(wall_s: float, body: Body) -> Recorded:
    raw = msgspec.Raw(codec.encode_body(body))
    identity = EventId("r", "p", 1, 1)
    return Recorded(1, Envelope(identity, body.SPEC.name, body.SPEC.version, wall_s, 0.0, raw), body)
