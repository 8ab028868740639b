"""Leases over HTTP: an environment worker asks for a rollout and gets a session to play it in."""

from __future__ import annotations

import asyncio

from aiohttp import web

from segue.errors import ConflictError, RequestError
from segue.events.session import SessionOpened
from segue.events.work import RolloutReserved
from session_server.bodies import Lease, LeaseRequest
from session_server.dialect import parse_object
from session_server.handlers_session import base_url, json_response, number
from session_server.requests import body_of
from session_server.routes import Route
from session_server.server import Server
from session_server.work import Candidate, task_seed

MAX_WAIT_S = 30.0
MAX_WORKER_NAME = 200


async def lease(server: Server, request: web.Request) -> web.StreamResponse:
    """{wait_s?, worker?} -> 200 with a session, or 204 after wait_s without work (or while admission is closed).

    A worker that names itself `name/incarnation` ends the leases of earlier incarnations of that name at once.
    """
    server.tokens.require_worker(request.headers)
    body = parse_object(await body_of(request) or b"{}")
    wait_s = float(number(body, "wait_s", 0.0, 0.0, MAX_WAIT_S))
    if server.sessions.full:
        raise RequestError(429, "rate_limit_error", "too many sessions are open")
    worker = body.get("worker", "")
    if not isinstance(worker, str) or len(worker) > MAX_WORKER_NAME:
        raise RequestError(
            400, "invalid_request_error", f"worker must be at most {MAX_WORKER_NAME} characters", "worker"
        )
    await _return_left_behind(server, worker)
    reserved = None
    try:
        async with asyncio.timeout(wait_s + 0.001) as limit:
            while reserved is None:
                candidate = server.work.next()
                if candidate is None:
                    await server.work.changed()
                elif request.transport is None:
                    server.work.put_back(candidate)  # nobody is there any more to play it
                    break
                else:
                    limit.reschedule(None)
                    reserved = await _reserve(server, candidate, worker)
    except TimeoutError:
        pass
    if reserved is None:
        return web.Response(status=204)
    return await _open(server, reserved)


async def _return_left_behind(server: Server, worker: str) -> None:
    for session_id in server.work.left_behind(worker):
        session = server.sessions.live.get(session_id)
        if session is not None and not session.ending:
            await server.endings.expire(session, "its worker was started again")


async def _reserve(server: Server, candidate: Candidate, worker: str) -> RolloutReserved | None:
    """None if another server was faster."""
    config = server.ctx.config
    fact = RolloutReserved(
        rollout_id=candidate.rollout_id, attempt=candidate.attempt, session_id=server.own_session_id(),
        purpose=candidate.purpose, group=candidate.group, member=candidate.member,
        seed=task_seed(config.run.seed, candidate.purpose, candidate.group),
        deadline_wall_s=server.clock.wall_s() + config.rollout.lease_s, worker=worker,
    )  # fmt: skip
    try:
        await server.facts.append(fact)
    except ConflictError:
        return None
    # At once, not only when it is read back: the worker's next incarnation may ask before that.
    server.work.apply(fact)
    return fact


async def _open(server: Server, lease: RolloutReserved) -> web.Response:
    config = server.ctx.config
    token, digest = server.session_token(lease.session_id)
    temperature = config.evaluation.temperature if lease.purpose == "eval" else config.rollout.temperature
    opened = SessionOpened(
        session_id=lease.session_id, token_digest=digest, rollout_id=lease.rollout_id, group=lease.group,
        member=lease.member, seed=lease.seed, purpose=lease.purpose, temperature=temperature,
        ttl_s=config.rollout.lease_s, token_budget=config.rollout.max_session_tokens,
    )  # fmt: skip
    await server.open_session(opened, deadline_wall_s=lease.deadline_wall_s, lease_attempt=lease.attempt)
    server.metrics.leases.inc()
    return json_response(
        {
            "session_id": lease.session_id, "token": token, "base_url": base_url(server, lease.session_id),
            "rollout_id": lease.rollout_id, "purpose": lease.purpose, "group": lease.group, "member": lease.member,
            "index": lease.group, "seed": lease.seed, "task": server.rows.row(lease.purpose, lease.group),
            "deadline_wall_s": lease.deadline_wall_s,
        }
    )  # fmt: skip


ROUTES = (
    Route(
        "POST", "/rollouts/lease", lease, "worker", "Lease a rollout", takes=LeaseRequest, gives=Lease,
        statuses=(204, 429, 503),
    ),
)  # fmt: skip
