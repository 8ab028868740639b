"""The routes of the session server, and what stands before each: ownership, tokens, tombstones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import orjson
from aiohttp import web

from segue.errors import LogError, RequestError
from session_server import handlers_chat, handlers_session, handlers_work
from session_server.auth import bearer
from session_server.bodies import Health, Readiness
from session_server.forward import forward
from session_server.handlers_session import json_response
from session_server.http_errors import errors
from session_server.openapi import document
from session_server.routes import PlainHandler, Route, SessionHandler
from session_server.server import SERVER, Server

LOG_DEADLINE_S = 2.0
_Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def healthz(server: Server, request: web.Request) -> web.StreamResponse:
    """Answered by the event loop, so only when it runs; `liveness` names the address that answers even then."""
    told = {"status": "ok", "service": server.service, "loop_lag_s": round(server.heart.lag_s, 3)}
    return json_response({**told, "liveness": server.liveness_url})


async def readyz(server: Server, request: web.Request) -> web.StreamResponse:
    """Whether a turn could be committed now: the log answers, and this process still holds it."""
    reason = ""
    if server.facts.broken.done():
        reason = "the log has moved on without this process"
    else:
        try:
            async with asyncio.timeout(LOG_DEADLINE_S):
                await server.feed.log.tail()
        except (LogError, TimeoutError) as error:
            reason = f"the log does not answer: {error}".removesuffix(": ")
    told = {
        "status": "not ready" if reason else "ready", "reason": reason,
        "admission": "open" if server.gate.pause is None else "closed", "sessions": len(server.sessions.live),
        "loop_lag_s": round(server.heart.lag_s, 3),
    }  # fmt: skip
    return json_response(told, 503 if reason else 200)


async def metrics(server: Server, request: web.Request) -> web.StreamResponse:
    """Prometheus text."""
    server.tokens.require_staff(request.headers)
    return web.Response(body=server.metrics.render(), content_type="text/plain")


async def openapi(server: Server, request: web.Request) -> web.StreamResponse:
    """This document."""
    return web.Response(body=_DOCUMENT, content_type="application/json")


ROUTES: tuple[Route, ...] = (
    *handlers_work.ROUTES,
    *handlers_session.ROUTES,
    *handlers_chat.ROUTES,
    Route("GET", "/healthz", healthz, "anyone", "Does the process live?", gives=Health),
    Route("GET", "/readyz", readyz, "anyone", "Can it commit a turn?", gives=Readiness, statuses=(503,)),
    Route("GET", "/metrics", metrics, "staff", "Metrics", gives="text/plain"),
    Route("GET", "/openapi.json", openapi, "anyone", "The OpenAPI document", gives="application/json"),
)
_DOCUMENT = orjson.dumps(document(ROUTES))


def application(server: Server) -> web.Application:
    app = web.Application(middlewares=[errors], client_max_size=server.ctx.config.session_server.max_body_bytes)
    app[SERVER] = server
    app.add_routes([web.route(route.method, route.path, _handle(route)) for route in ROUTES])
    return app


def _handle(route: Route) -> _Handle:
    if route.caller == "session":
        return _of_session(route)
    handler = cast(PlainHandler, route.handle)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request.app[SERVER], request)

    return handle


def _of_session(route: Route) -> _Handle:
    """A route of one session: passed on to its owner, its token checked."""
    handler, over, finished_again = cast(SessionHandler, route.handle), route.over, route.finished_again

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
