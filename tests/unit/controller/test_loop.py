"""The controller's shell over a log in memory: what a restart finds and what it says first."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controller.loop import Loop
from segue.boot import Endpoints, RunContext
from segue.config.schema import Config
from segue.events import run
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
