"""The router as a process: follows the log, obeys its commands, probes engines, answers HTTP.

Order at start: catch up with the log, then listen, then say ServiceReady; so nobody is ever assigned by half a picture.
A command is acknowledged after its fact stands in the log. What was closed before a restart is closed after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from router import policies
from router.app import make_app
from router.assign import Assigner
from router.health import Prober
from router.state import SERVICE, RouterState
from segue.boot import RunContext
from segue.errors import LogUnavailable, ProcessError
from segue.events import engine, run, work
from segue.log import open_log
from segue.log.follow import follow
from segue.log.protocol import Delivery, EventLog
from segue.log.writer import Writer

COMMAND_WAIT_S = 5.0
LOG_PAUSE_S = 0.5
GATHER_S = 0.02
"""An engine that starts or is lost is known this much later at most."""
MAX_DELIVERIES = 5
"""A command that kept killing its handler this often is set aside."""

_log = logging.getLogger(__name__)


class Commands:
    """Carries out the router's command stream in order, each command once."""

    def __init__(self, log: EventLog, writer: Writer, assigner: Assigner) -> None:
        self._log, self._writer, self._assigner = log, writer, assigner

    async def run(self) -> None:
        while True:
            try:
                deliveries = await self._log.receive(SERVICE, SERVICE, wait_s=COMMAND_WAIT_S)
            except LogUnavailable as error:
                _log.warning("no commands for now: %s", error)
                await asyncio.sleep(LOG_PAUSE_S)
                continue
            for delivery in deliveries:
                await self.handle(delivery)

    async def handle(self, delivery: Delivery) -> None:
        """Do what the command asks, append the fact that says so, acknowledge."""
        recorded = delivery.event
        if delivery.deliveries > MAX_DELIVERIES or recorded.body is None:
            await self._set_aside(delivery)
            return
        match recorded.body:
            case work.CloseAdmission(pause=pause):
                self._assigner.admission_open = False
                await self._writer.append(work.AdmissionClosed(pause=pause, service=SERVICE), cause=recorded.id)
            case work.OpenAdmission(admission=admission):
                self._assigner.admission_open = True
                await self._writer.append(work.AdmissionOpened(admission=admission, service=SERVICE), cause=recorded.id)
            case engine.DrainEngine():
                self._assigner.state.apply(recorded.body)
                await report_drained(self._assigner, self._writer)
            case _:
                _log.error("command %s is not for the router", recorded.envelope.type)
        await self._log.acknowledge(SERVICE, [recorded.position])

    async def _set_aside(self, delivery: Delivery) -> None:
        recorded = delivery.event
        reason = "unknown to this build" if recorded.body is None else "delivered too often"
        await self._log.bury(SERVICE, recorded.position, reason)
        await self._writer.append(
            run.CommandDeadLettered(
                command_position=recorded.position, target=SERVICE, deliveries=delivery.deliveries, reason=reason
            ),
            cause=recorded.id,
        )


async def report_drained(assigner: Assigner, writer: Writer) -> None:
    """Say EngineDrained of every draining engine whose last session has left."""
    for one in assigner.drained():
        assert one.drain is not None
        one.drained = True
        await writer.append(engine.EngineDrained(engine_id=one.engine_id, drain=one.drain))


async def catch_up(log: EventLog, assigner: Assigner) -> int:
    """Fold everything that is in the log now; returns the last position. Admission is as this service last said."""
    position, end = 0, await log.tail()
    while position < end:
        for recorded in await log.read(position):
            position = recorded.position
            if recorded.body is not None:
                assigner.state.apply(recorded.body)
    assigner.admission_open = assigner.state.admission_open
    return position


async def keep_up(log: EventLog, after: int, assigner: Assigner, writer: Writer) -> None:
    async for recorded in follow(log, after, gather_s=GATHER_S):
        if recorded.body is not None:
            assigner.state.apply(recorded.body)
            await report_drained(assigner, writer)


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[None]:
    """Serve `app` while the block runs. Raises ProcessError if nothing can listen there."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ProcessError(f"the router cannot listen on {host}:{port}: {error.strerror}") from error
        yield
    finally:
        await runner.cleanup()


def _http() -> aiohttp.ClientSession:
    """To the engines. Unlimited: a connection limit here would be a second, hidden admission control."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def serve(ctx: RunContext, log: EventLog) -> None:
    """Be the router of this run until cancelled."""
    address, tokens = ctx.endpoints.router_url, (ctx.endpoints.worker_token, ctx.endpoints.admin_token)
    host, port = urlsplit(address).hostname, urlsplit(address).port
    if host is None or port is None:
        raise ProcessError(f"endpoints.json: router_url {address!r} has no host and port")
    assigner = Assigner(RouterState(), policies.create(ctx.config.router.policy))
    async with await Writer.open(log, SERVICE) as writer, _http() as http:
        position = await catch_up(log, assigner)
        async with listening(make_app(assigner, http, tokens), host, port), asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_up(log, position, assigner, writer))
            tasks.create_task(Commands(log, writer, assigner).run())
            tasks.create_task(Prober(assigner, http, ctx.config.router.health_interval_s).run())
            await writer.append(run.ServiceReady(service=SERVICE, url=address, pid=os.getpid()))


async def main(ctx: RunContext) -> None:
    log = await open_log(ctx)
    try:
        await serve(ctx, log)
    finally:
        await log.close()
