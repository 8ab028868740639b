"""The router's HTTP surface: assignments for session servers, a plain proxy for clients without sessions.

Every route but /healthz and /readyz wants the run's worker or admin token. Errors have the OpenAI shape; those that
pass by themselves (503) carry Retry-After.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from router.assign import Assigner
from segue.errors import RequestError

OPEN_ROUTES = ("/healthz", "/readyz")
RETRY_AFTER_S = "1"
MAX_BODY_BYTES = 64 * 1024 * 1024
PLAIN_TIMEOUT = aiohttp.ClientTimeout(total=600.0)
_CHUNK_BYTES = 64 * 1024

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AssignBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session_id: str
    exclude: tuple[str, ...] = ()


class ReleaseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session_id: str


class EngineView(msgspec.Struct, frozen=True):
    """One row of GET /engines."""

    engine_id: str
    incarnation: str
    url: str
    version: int
    up: bool
    torn: bool
    paused: bool
    draining: bool
    healthy: bool
    admitted: bool
    sessions: int


class Metrics:
    """Prometheus view of one Assigner; gauges are read when they are scraped."""

    def __init__(self, assigner: Assigner) -> None:
        self.registry = CollectorRegistry()
        self.assignments = Counter(
            "segue_router_assignments", "Sessions placed or kept, by engine", ["engine"], registry=self.registry
        )
        self.refusals = Counter(
            "segue_router_refusals", "Requests refused, by reason", ["reason"], registry=self.registry
        )
        self.proxied = Counter(
            "segue_router_plain_requests", "Requests without a session, by engine", ["engine"], registry=self.registry
        )
        state = assigner.state
        for name, text, read in (
            ("engines_usable", "Engines that may get work", lambda: len(assigner.usable())),
            ("engines_known", "Engines that were ever started", lambda: len(state.engines)),
            ("sessions", "Sessions assigned to an engine", lambda: len(state.assigned)),
            ("admitted_version", "Weight version that engines must hold", lambda: state.admitted or 0),
        ):
            Gauge(f"segue_router_{name}", text, registry=self.registry).set_function(read)


ASSIGNER = web.AppKey("assigner", Assigner)
HTTP = web.AppKey("http", aiohttp.ClientSession)
TOKENS = web.AppKey("tokens", tuple[str, ...])
METRICS = web.AppKey("metrics", Metrics)


def make_app(assigner: Assigner, http: aiohttp.ClientSession, tokens: tuple[str, ...]) -> web.Application:
    """The application; `tokens` are accepted as bearer tokens, `http` reaches the engines."""
    app = web.Application(middlewares=[_answer_errors, _authorise], client_max_size=MAX_BODY_BYTES)
    app[ASSIGNER], app[HTTP], app[TOKENS], app[METRICS] = assigner, http, tokens, Metrics(assigner)
    app.router.add_post("/assign", _assign)
    app.router.add_post("/release", _release)
    app.router.add_get("/engines", _engines)
    app.router.add_post("/v1/chat/completions", _plain)
    app.router.add_post("/generate", _plain)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    return app


def error_response(error: RequestError) -> web.Response:
    retryable = error.status in (429, 502, 503, 504)
    body = {"error": {"type": error.kind, "message": error.message, "param": error.param, "retryable": retryable}}
    headers = {"Retry-After": RETRY_AFTER_S} if error.status in (429, 503) else None
    return _json(body, status=error.status, headers=headers)


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        request.app[METRICS].refusals.labels(error.kind).inc()
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(RequestError(error.status, "invalid_request_error", error.reason))


@web.middleware
async def _authorise(request: web.Request, handler: _Handler) -> web.StreamResponse:
    if request.path not in OPEN_ROUTES:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # No early exit: the time taken says nothing about which token was nearly right.
        matches = [hmac.compare_digest(given.encode(), token.encode()) for token in request.app[TOKENS]]
        if scheme.lower() != "bearer" or not any(matches):
            raise RequestError(401, "authentication_error", "a worker or admin token of this run is needed")
    return await handler(request)


async def _read[T](request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise RequestError(400, "invalid_request_error", str(error)) from error


async def _assign(request: web.Request) -> web.Response:
    body = await _read(request, AssignBody)
    one = request.app[ASSIGNER].assign(body.session_id, body.exclude)
    request.app[METRICS].assignments.labels(one.engine_id).inc()
    return _json({"engine_id": one.engine_id, "incarnation": one.incarnation, "url": one.url, "version": one.version})


async def _release(request: web.Request) -> web.Response:
    request.app[ASSIGNER].state.remove((await _read(request, ReleaseBody)).session_id)
    return web.Response(status=204)


async def _engines(request: web.Request) -> web.Response:
    assigner = request.app[ASSIGNER]
    usable = {one.engine_id for one in assigner.usable()}
    return _json(
        [
            EngineView(
                engine_id, one.incarnation, one.url, one.version, one.up, one.torn, one.paused, one.drain is not None,
                engine_id not in assigner.sick, engine_id in usable, len(one.sessions),
            )
            for engine_id, one in sorted(assigner.state.engines.items())
        ]
    )  # fmt: skip


async def _healthz(request: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    """Ready when a session could be placed; admission may be closed, that is part of every step."""
    if not request.app[ASSIGNER].usable():
        raise RequestError(503, "no_engine", "no engine may be used yet")
    return _json({"status": "ready"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(request.app[METRICS].registry), content_type="text/plain", charset="utf-8")


async def _plain(request: web.Request) -> web.StreamResponse:
    """Hand the body to the least loaded engine and its answer back, chunk by chunk, whatever they are."""
    body = await request.read()
    headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
    with request.app[ASSIGNER].plain() as one:
        request.app[METRICS].proxied.labels(one.engine_id).inc()
        call = request.app[HTTP].post(one.url + request.path, data=body, headers=headers, timeout=PLAIN_TIMEOUT)
        response = web.StreamResponse()
        try:
            async with call as answer:
                response.set_status(answer.status)
                response.content_type = answer.content_type
                async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(chunk)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response.prepared:
                raise  # half an answer is out: only a broken connection can say so
            raise RequestError(502, "engine_unavailable", f"engine {one.engine_id}: {error!r}") from error
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response
