"""Composition of one session server process: log, fold, routes, followers. The only file that knows all parts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from segue.blobs import BlobStore
from segue.boot import RunContext
from segue.clock import SystemClock
from segue.events.engine import EngineDrained, EngineLost, EngineResumed
from segue.events.run import ServiceReady
from segue.log import EventLog, Writer, follow, open_log
from segue.wire.engine import RouteShape
from segue.wire.rows import RowLedger
from session_server.asks import Asks
from session_server.auth import Tokens
from session_server.budget import Budget
from session_server.commands import Commands
from session_server.connections import Guard, listen
from session_server.dataset import Datasets
from session_server.endings import Endings
from session_server.engine_client import EngineClient, RouterClient
from session_server.engine_http import Connections
from session_server.facts import Facts
from session_server.families import choose
from session_server.feed import Feed, history
from session_server.fold import ServerFold
from session_server.liveness import Heart, liveness
from session_server.metrics import Metrics
from session_server.model_text import ModelText
from session_server.pause import Gate, Running
from session_server.restore import Restore
from session_server.selection import Steps
from session_server.server import Server, Tasks, service_name
from session_server.sessions import Sessions
from session_server.surface import application
from session_server.turns import Turns
from session_server.work import Work

SWEEP_S = 0.5
SHUTDOWN_S = 2.0
READ_LIMIT = 2048
FOLLOW_PACE_S = 0.01
"""Under load events come one by one: waiting this long first reads many at once, and a resume can wait as long."""
_logger = logging.getLogger(__name__)


async def serve(ctx: RunContext, index: int, log: EventLog | None = None) -> None:
    """Serve until cancelled. `log` is for tests; otherwise the run's own is opened (and closed)."""
    async with AsyncExitStack() as stack:
        if log is None:
            log = await open_log(ctx)
            stack.push_async_callback(log.close)
        writer = await stack.enter_async_context(await Writer.open(log, service_name(index)))
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, auto_decompress=False))
        facts = Facts(writer)
        config = ctx.config
        fold = ServerFold(service_name(index), index, config.session_server.count, Work(config.rollout.max_returns))
        await _read_all(log, ctx, fold)
        async with asyncio.TaskGroup() as group:
            heart, address = Heart(), urlsplit(ctx.endpoints.session_urls[index])
            port = config.session_server.health_port
            alive = stack.enter_context(liveness(heart, address.hostname or "127.0.0.1", port and port + index))
            group.create_task(heart.beat())
            feed = Feed(log, ctx.run_dir, fold.position)
            server, restore, engines = _compose(ctx, index, facts, http, fold, Tasks(group), feed, heart, alive)
            stack.callback(engines.connections.close)
            await restore.run(fold)
            commands = Commands(
                service_name(index), config, log, facts, server.gate, server.running, server.work, engines,
                fold.last_pause, fold.last_admission,
            )  # fmt: skip
            await stack.enter_async_context(_listening(server))
            await facts.append(ServiceReady(service=service_name(index), url=server.url, pid=os.getpid()))
            group.create_task(_follow(server, log, fold.position))
            group.create_task(commands.consume())
            group.create_task(_sweep(server))
            group.create_task(_watch(facts))


def _compose(
    ctx: RunContext,
    index: int,
    facts: Facts,
    http: aiohttp.ClientSession,
    fold: ServerFold,
    tasks: Tasks,
    feed: Feed,
    heart: Heart,
    liveness_url: str,
) -> tuple[Server, Restore, EngineClient]:
    config, clock = ctx.config, SystemClock()
    text = ModelText(Path(config.model.path))
    family = choose(config.model.family, text)
    routes, empty_rows = None, None
    if config.r3.enabled:
        shape = text.route_shape(config.model.route_layers)
        routes = RouteShape(shape.layers, shape.top_k)
        empty_rows = RowLedger(shape.layers, shape.top_k, shape.experts)
    engines = EngineClient(http, Connections(), config.engine.request_deadline_s, routes)
    router = RouterClient(http, ctx.endpoints.router_url, ctx.endpoints.worker_token)
    blobs, gate, running = BlobStore(ctx.blob_dir), Gate(), Running()
    sessions = Sessions(Budget(config.session_server.max_memory_bytes), config.session_server.max_open_sessions)
    if fold.closed_pause is not None:
        gate.close(fold.closed_pause)
        for engine_id in fold.resumed:
            gate.resumed(engine_id, fold.closed_pause)
    turns = Turns(
        config, clock, facts, blobs, engines, router, gate, running, family, tasks.spawn, empty_rows, sessions.budget
    )
    steps = Steps.load(config.session_server.select_leaves, config.session_server.finish_samples)
    endings = Endings(facts, blobs, sessions, fold.work, router, family, tasks.spawn, steps)
    server = Server(
        ctx, index, clock, facts, http, router, sessions, fold.work, gate, running, family,
        Asks(config, family, sessions.budget), turns, endings,
        Tokens(ctx.endpoints.admin_token, ctx.endpoints.worker_token), Metrics(), feed, heart, liveness_url,
        Datasets.open(config),
    )  # fmt: skip
    return server, Restore(config, clock, facts, blobs, sessions, engines, endings, empty_rows), engines


async def _read_all(log: EventLog, ctx: RunContext, fold: ServerFold) -> None:
    """Fold the log up to its present end, its sealed beginning included. Older epochs of this producer are fenced:
    nothing of theirs can follow."""
    async for event in history(log, ctx.run_dir, fold.position, await log.tail(), READ_LIMIT):
        fold.apply(event)


async def _follow(server: Server, log: EventLog, after: int) -> None:
    """Keep up with what others do. Work facts are applied from here, this server's own included."""
    async for event in follow(log, after, gather_s=FOLLOW_PACE_S):
        server.feed.tell(event)
        body = event.body
        if body is None:
            continue
        server.work.apply(body)
        match body:
            case EngineResumed():
                server.gate.resumed(body.engine_id, body.pause)
            case EngineLost() | EngineDrained():
                _unassign(server, body.engine_id)
            case _:
                pass


def _unassign(server: Server, engine_id: str) -> None:
    """Sessions of a lost or drained engine ask the router again at their next request."""
    for session in server.sessions.live.values():
        if session.assignment is not None and session.assignment.engine_id == engine_id:
            session.assignment = None
    server.gate.engine_lost(engine_id)


async def _sweep(server: Server) -> None:
    """Expire sessions whose time is up; one with an open turn waits for it."""
    while True:
        await server.clock.sleep(SWEEP_S)
        now = server.clock.wall_s()
        live = server.sessions.live
        due = [s for s in live.values() if s.deadline_wall_s <= now and not s.ending and not s.attempts]
        for session in due:
            if not session.ending:
                await server.endings.expire(session, "deadline" if session.lease_attempt >= 0 else "time to live")
        server.metrics.sessions.set(len(live))
        server.metrics.held.set(server.sessions.budget.held_bytes)
        server.metrics.spilled.set(server.sessions.budget.spilled_bytes)
        server.metrics.running.set(len(server.running))


@asynccontextmanager
async def _listening(server: Server) -> AsyncIterator[None]:
    runner = web.AppRunner(application(server), access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    assert runner.server is not None
    address, guard = urlsplit(server.url), Guard(server.ctx.config.session_server.max_connections)
    listener = await listen(runner.server, guard, address.hostname, address.port or 0)
    try:
        yield
    finally:
        listener.close()
        await runner.cleanup()


async def _watch(facts: Facts) -> None:
    await facts.broken
