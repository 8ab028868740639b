"""Two controllers on one run, over a real log server: the older one can append nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controller.loop import Loop
from segue.boot import Endpoints, RunContext
from segue.config.schema import Config
from segue.errors import FencedError
from segue.events import engine, run, step
from segue.log import EventLog, Writer
from segue.testing.log_fixtures import LogServer, log_server

__all__ = ["log_server"]


def context() -> RunContext:
    return RunContext("two", Path("/nowhere"), Config(), Endpoints("", "", (), "", "", "", "", "start"))


async def control(log: EventLog) -> None:
    async with await Writer.open(log, "controller", deadline_s=5.0) as writer:
        await Loop(context(), log, writer).run()


async def said_by(log: EventLog, epoch: int) -> int:
    return sum(e.id.producer == "controller" and e.id.epoch == epoch for e in await log.read(0, limit=10_000))


@pytest.fixture
async def server(log_server: LogServer) -> AsyncIterator[LogServer]:
    yield log_server
    await log_server.close_logs()


async def test_the_older_of_two_controllers_appends_nothing_more(server: LogServer) -> None:
    watching = await server.open("two")
    async with asyncio.timeout(30):
        older = asyncio.ensure_future(control(await server.open("two")))
        while not await said_by(watching, 1):
            await asyncio.sleep(0.02)
        newer = asyncio.ensure_future(control(await server.open("two")))
        while not await said_by(watching, 2):
            await asyncio.sleep(0.02)
        # Both now have something to say: every part is up, so admission is due.
        async with await Writer.open(watching, "world") as world:
            for service in ("session-0", "router"):
                await world.append(run.ServiceReady(service, "http://x", 1))
            await world.append(engine.EngineStarted("engine-0", "i1", "http://e", "fake", 0, "c", 0.1))
            await world.append(step.TrainerReady("t1", "fake", 0, 0, "d", 0.1))
        with pytest.raises(FencedError):
            await older
        while await said_by(watching, 2) < 2:
            await asyncio.sleep(0.02)
        newer.cancel()
        await asyncio.wait([newer])
    events = await watching.read(0, limit=10_000)
    assert await said_by(watching, 1) == 1, "its first word, from before"
    taken_over = next(e.position for e in events if e.id.producer == "controller" and e.id.epoch == 2)
    assert not [e for e in events if e.position > taken_over and e.id.producer == "controller" and e.id.epoch == 1]
    asked = [e.envelope.type for e in events if e.id.epoch == 2 and e.id.producer == "controller"]
    assert "work.open_admission" in asked
