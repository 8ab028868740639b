"""Composition of one session server process: log, fold, routes, followers. The only file that knows all parts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from segue.blobs import BlobStore
from segue.boot import RunContext
from segue.clock import SystemClock
from segue.errors import LogTrimmedError, RequestError
from segue.events.engine import EngineDrained, EngineLost, EngineResumed
from segue.events.run import ServiceReady
from segue.log import EventLog, Writer, follow, open_log
from segue.log.reader import RunReader, open_reader
from segue.wire.engine import RouteShape
from segue.wire.rows import RowLedger
from session_server import handlers_chat, handlers_session, handlers_work
from session_server.asks import Asks
from session_server.auth import Tokens, bearer
from session_server.commands import Commands
from session_server.endings import Endings
from session_server.engine_client import EngineClient, RouterClient
from session_server.facts import Facts
from session_server.families import choose
from session_server.fold import ServerFold
from session_server.forward import forward
from session_server.http_errors import errors
from session_server.metrics import Metrics
from session_server.model_text import ModelText
from session_server.pause import Gate, Running
from session_server.restore import Restore
from session_server.server import SERVER, Server, Tasks
from session_server.sessions import Session, Sessions
from session_server.turns import Turns
from session_server.work import Work

SWEEP_S = 0.5
SHUTDOWN_S = 2.0
READ_LIMIT = 2048
FOLLOW_PACE_S = 0.01
"""Under load events come one by one: waiting this long first reads many at once, and a resume can wait as long."""
_logger = logging.getLogger(__name__)
SessionHandler = Callable[[Server, web.Request, Session], Awaitable[web.StreamResponse]]


def service_name(index: int) -> str:
    return f"session-{index}"


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
            server, restore, engines = _compose(ctx, index, facts, http, fold, Tasks(group))
            await restore.run(fold)
            commands = Commands(
                service_name(index), config, log, facts, server.gate, server.running, server.work, engines,
                fold.last_pause, fold.last_admission,
            )  # fmt: skip
            runner = web.AppRunner(_application(server), access_log=None, shutdown_timeout=SHUTDOWN_S)
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            address = urlsplit(server.url)
            await web.TCPSite(runner, address.hostname, address.port, backlog=1024).start()
            await facts.append(ServiceReady(service=service_name(index), url=server.url, pid=os.getpid()))
            group.create_task(_follow(server, log, fold.position))
            group.create_task(commands.consume())
            group.create_task(_sweep(server))
            group.create_task(_watch(facts))


def _compose(
    ctx: RunContext, index: int, facts: Facts, http: aiohttp.ClientSession, fold: ServerFold, tasks: Tasks
) -> tuple[Server, Restore, EngineClient]:
    config, clock = ctx.config, SystemClock()
    text = ModelText(Path(config.model.path))
    family = choose(config.model.family, text)
    routes, empty_rows = None, None
    if config.r3.enabled:
        shape = text.route_shape(config.model.route_layers)
        routes = RouteShape(shape.layers, shape.top_k)
        empty_rows = RowLedger(shape.layers, shape.top_k, shape.experts)
    engines = EngineClient(http, config.engine.request_deadline_s, routes)
    router = RouterClient(http, ctx.endpoints.router_url, ctx.endpoints.worker_token)
    blobs, gate, running, sessions = BlobStore(ctx.blob_dir), Gate(), Running(), Sessions()
    if fold.closed_pause is not None:
        gate.close(fold.closed_pause)
        for engine_id in fold.resumed:
            gate.resumed(engine_id, fold.closed_pause)
    turns = Turns(config, clock, facts, blobs, engines, router, gate, running, family, tasks.spawn, empty_rows)
    endings = Endings(facts, blobs, sessions, fold.work, router, family, tasks.spawn)
    server = Server(
        ctx, index, clock, facts, http, router, sessions, fold.work, gate, running, family, Asks(config, family),
        turns, endings, Tokens(ctx.endpoints.admin_token, ctx.endpoints.worker_token), Metrics(),
    )  # fmt: skip
    return server, Restore(config, clock, facts, blobs, sessions, engines, endings, empty_rows), engines


async def _read_all(log: EventLog, ctx: RunContext, fold: ServerFold) -> None:
    """Fold the log up to its present end, its sealed beginning included. Older epochs of this producer are fenced:
    nothing of theirs can follow."""
    end = await log.tail()
    try:
        await _read_up_to(log, end, fold)
    except LogTrimmedError:
        reader = await open_reader(ctx.run_dir)
        try:
            await _read_up_to(reader, end, fold)
        finally:
            await reader.close()


async def _read_up_to(log: EventLog | RunReader, end: int, fold: ServerFold) -> None:
    while fold.position < end:
        for event in await log.read(fold.position, limit=READ_LIMIT):
            fold.apply(event)


async def _follow(server: Server, log: EventLog, after: int) -> None:
    """Keep up with what others do. Work facts are applied from here, this server's own included."""
    async for event in follow(log, after, gather_s=FOLLOW_PACE_S):
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
        server.metrics.running.set(len(server.running))


async def _watch(facts: Facts) -> None:
    await facts.broken


def _application(server: Server) -> web.Application:
    app = web.Application(middlewares=[errors], client_max_size=server.ctx.config.session_server.max_body_bytes)
    app[SERVER] = server
    app.add_routes(
        [
            web.post("/rollouts/lease", _plain(handlers_work.lease)),
            web.post("/sessions", _plain(handlers_session.open_session)),
            web.get("/sessions/{id}", _of_session(handlers_session.view)),
            web.delete("/sessions/{id}", _of_session(handlers_session.delete)),
            web.post("/sessions/{id}/v1/chat/completions", _of_session(handlers_chat.chat_completions)),
            web.post("/sessions/{id}/v1/responses", _of_session(handlers_chat.responses)),
            web.post("/sessions/{id}/v1/messages", _of_session(handlers_chat.messages)),
            web.post("/sessions/{id}/generate", _of_session(handlers_chat.generate)),
            web.post("/sessions/{id}/reward", _of_session(handlers_session.reward, over=409)),
            web.post("/sessions/{id}/finish", _of_session(handlers_session.finish, finished_again=True)),
            web.get("/sessions/{id}/samples", _of_session(handlers_session.samples)),
            web.get("/healthz", _healthz),
            web.get("/readyz", _healthz),
            web.get("/metrics", _metrics),
        ]
    )
    return app


def _plain(
    handler: Callable[[Server, web.Request], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request.app[SERVER], request)

    return handle


def _of_session(
    handler: SessionHandler, *, over: int = 410, finished_again: bool = False
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A route of one session: passed on to its owner, its token checked. `over`: status once the session is over;
    `finished_again`: a finished session answers with what finish answered."""

    async def handle(request: web.Request) -> web.StreamResponse:
        server, session_id = request.app[SERVER], request.match_info["id"]
        if (owner := server.owner(session_id)) != server.index:
            return await forward(server, request, owner)
        session = server.sessions.live.get(session_id)
        tombstone = server.sessions.tombstone(session_id) if session is None else None
        if tombstone is not None:
            server.tokens.require_session(request.headers, tombstone.token_digest)
            if finished_again and tombstone.kind == "finished":
                return handlers_session.tombstone_response(tombstone)
            kind = "conflict_error" if over == 409 else "gone_error"
            raise RequestError(over, kind, f"session {session_id} is over: {tombstone.kind}")
        if session is None:
            bearer(request.headers)
            session = server.sessions.get(session_id)
        server.tokens.require_session(request.headers, session.opened.token_digest)
        return await handler(server, request, session)

    return handle


async def _healthz(request: web.Request) -> web.Response:
    """Answers only after the log was folded, so being alive is being ready."""
    server = request.app[SERVER]
    return handlers_session.json_response({"status": "ok", "service": service_name(server.index)})


async def _metrics(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    server.tokens.require_staff(request.headers)
    return web.Response(body=server.metrics.render(), content_type="text/plain")
