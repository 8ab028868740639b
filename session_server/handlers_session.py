"""Sessions over HTTP: open, look at, reward, finish, take samples, delete."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from segue.errors import CodecError, RequestError
from segue.events.codec import Recorded, encode_body
from segue.events.session import SessionOpened
from session_server.assemble import total_reward
from session_server.bodies import (
    MAX_REWARD,
    EventsQuery,
    Finish,
    Finished,
    Opened,
    OpenSession,
    Reward,
    SamplesQuery,
    SessionView,
)
from session_server.dialect import parse_object
from session_server.endings import FinishBody
from session_server.forward import forward
from session_server.graph import Node
from session_server.http_errors import error_response
from session_server.messages import invalid
from session_server.requests import STREAM_HEADERS, body_of, break_off
from session_server.routes import Route
from session_server.server import Server
from session_server.sessions import Session, Tombstone

_SESSION_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_JSON = "application/json"


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type=_JSON)


async def open_session(server: Server, request: web.Request) -> web.StreamResponse:
    """{id?, metadata?, purpose?, group?, member?, seed?, temperature?, token_budget?, ttl_s?} -> {session_id, token,
    base_url}. With an id that is open already: the same again, without its token."""
    server.tokens.require_staff(request.headers)
    data = await body_of(request)
    body = parse_object(data or b"{}")
    session_id = body.get("id")
    if session_id is not None:
        if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
            raise invalid("'id' must be 1 to 128 letters, digits, '.', '_' or '-'", "id")
        if (owner := server.owner(session_id)) != server.index:
            return await forward(server, request, owner)
        if session_id in server.sessions.live or server.sessions.tombstone(session_id) is not None:
            server.sessions.get(session_id)
            return json_response({"session_id": session_id, "token": None, "base_url": base_url(server, session_id)})
    if server.sessions.full:
        raise RequestError(429, "rate_limit_error", "too many sessions are open")
    session_id = session_id or server.own_session_id()
    token, digest = server.session_token(session_id)
    await server.open_session(_opened(server, session_id, digest, body))
    return json_response({"session_id": session_id, "token": token, "base_url": base_url(server, session_id)})


def base_url(server: Server, session_id: str) -> str:
    return f"{server.url}/sessions/{session_id}/v1"


def _opened(server: Server, session_id: str, digest: str, body: Mapping[str, Any]) -> SessionOpened:
    config = server.ctx.config
    purpose = body.get("purpose", "serve")
    if purpose not in ("serve", "train", "eval"):
        raise invalid("'purpose' must be serve, train or eval", "purpose")
    usual = config.evaluation.temperature if purpose == "eval" else config.rollout.temperature
    temperature = float(number(body, "temperature", usual, 0.0, 10.0))
    if purpose == "train" and temperature != config.rollout.temperature:
        raise invalid(f"training sessions have the run's temperature {config.rollout.temperature}", "temperature")
    return SessionOpened(
        session_id=session_id,
        token_digest=digest,
        rollout_id=session_id,
        group=int(number(body, "group", -1, -1, 2**53)),
        member=int(number(body, "member", 0, 0, 2**31)),
        seed=int(number(body, "seed", 0, 0, 2**63 - 1)),
        purpose=purpose,
        temperature=temperature,
        ttl_s=float(number(body, "ttl_s", config.session_server.ttl_s, 1.0, 1e9)),
        token_budget=int(number(body, "token_budget", config.rollout.max_session_tokens, 1, 2**31)),
        metadata=texts(body, "metadata"),
    )


def number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A finite number of the body. Raises RequestError 400."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"'{name}' must be a number from {low:g} to {high:g}", name)
    return value


def texts(body: Mapping[str, Any], name: str) -> dict[str, str]:
    """A flat object of strings; other plain values are spelled as JSON. Raises RequestError 400."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"'{name}' must be an object", name)
    return {key: item if isinstance(item, str) else orjson.dumps(item).decode() for key, item in value.items()}


async def view(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """What is committed; nothing of turns that are open."""
    opened = session.opened
    return json_response(
        {
            "session_id": opened.session_id, "rollout_id": opened.rollout_id, "purpose": opened.purpose,
            "group": opened.group, "member": opened.member, "seed": opened.seed, "metadata": opened.metadata,
            "temperature": opened.temperature, "token_budget": opened.token_budget,
            "deadline_wall_s": session.deadline_wall_s, "turns": [_turn_view(node) for node in session.graph.nodes],
            "rewards": [
                {"key": r.reward_key, "value": r.value, "turn": r.turn}
                for r in session.rewards.values()
                if _recorded(session, r.reward_key)
            ],
        }
    )  # fmt: skip


def _recorded(session: Session, key: str) -> bool:
    """Whether the reward stands in the log."""
    written = session.reward_writes.get(key)
    return written is None or (written.done() and not written.cancelled() and written.exception() is None)


def _turn_view(node: Node) -> dict[str, object]:
    return {
        "turn_id": node.turn_id, "parent_id": node.parent.turn_id if node.parent is not None else None,
        "finish_reason": node.finish_reason, "parts": node.parts, "prompt_tokens": node.prompt_tokens,
        "output_tokens": len(node.tokens.output), "messages": [message.raw for message in node.messages],
        "prompt_ids": node.tokens.prompt.tolist(), "output_ids": node.tokens.output.tolist(),
        "logprobs": node.tokens.logprobs.tolist(), "weight_versions": node.tokens.spans,
    }  # fmt: skip


async def reward(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """A reward of the whole rollout, or of one turn (`turn`, counted by commit from 0); one `key` is recorded once."""
    body = parse_object(await body_of(request))
    session = server.sessions.open_for_turns(session.session_id)
    key = body.get("key", "reward")
    if not isinstance(key, str) or not key:
        raise invalid("'key' must be a string", "key")
    value, turn = _reward_value(body.get("value"), "value"), int(number(body, "turn", -1, -1, 2**31))
    if turn >= len(session.graph.nodes):
        raise invalid(f"the session has {len(session.graph.nodes)} turns, there is no turn {turn}", "turn")
    await server.endings.reward(session, key, value, turn)
    return json_response({"session_id": session.session_id, "key": key, "value": value, "turn": turn})


def _reward_value(value: object, param: str) -> float:
    # Rewards of turns travel as float32; what does not fit would train as infinity.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        raise invalid(f"'{param}' must be a number that a float32 holds", param)
    return float(value)


async def finish(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """End the session: its sample is put together and recorded once. Repeating it gives the same answer."""
    body = parse_finish(parse_object(await body_of(request) or b"{}"), len(session.graph.nodes))
    return tombstone_response(await server.endings.finish(session, body))


def tombstone_response(tombstone: Tombstone) -> web.Response:
    """The answer of finish: 200, or 422 where a sample should have been and was impossible."""
    answer = tombstone.answer or {}
    if tombstone.status != 200:
        return error_response(RequestError(tombstone.status, "assembly_error", str(answer.get("rejected"))))
    return json_response(answer)


def parse_finish(body: Mapping[str, Any], turns: int) -> FinishBody:
    """Raises RequestError 400."""
    status = body.get("status", "ok")
    if not isinstance(status, str) or not status:
        raise invalid("'status' must be a string", "status")
    rewards: list[tuple[str, float, int]] = []
    per_turn = body.get("per_turn")
    if per_turn is not None:
        if not isinstance(per_turn, list) or len(per_turn) > turns:
            raise invalid(f"'per_turn' must be a list of at most {turns} rewards (null: none)", "per_turn")
        rewards += [
            (f"finish-{turn}", _reward_value(value, f"per_turn[{turn}]"), turn)
            for turn, value in enumerate(per_turn)
            if value is not None
        ]
    if body.get("reward") is not None:
        rewards.append(("finish", _reward_value(body["reward"], "reward"), -1))
    return FinishBody(status, tuple(rewards), texts(body, "metadata"))


def _natural(text: str) -> int:
    """A whole number from 0 to 2**62, -1 for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1


async def samples(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """The frame that the session would give now; changes nothing. A reward that is not there yet is 0."""
    given = request.query.get("max_seq_len")
    if given is not None and _natural(given) < 1:
        raise invalid("'max_seq_len' must be a positive whole number", "max_seq_len")
    masks = request.query.get("masks", "false")
    if masks not in ("true", "false"):
        raise invalid("'masks' must be true or false", "masks")
    try:
        made = await server.endings.assembled(
            session, total_reward(session.rewards.values()) or 0.0, session.opened.metadata,
            with_mask=masks == "true", max_tokens=int(given) if given is not None else None,
        )  # fmt: skip
    except CodecError as error:
        raise RequestError(422, "assembly_error", str(error)) from error
    if made is None:
        raise RequestError(422, "assembly_error", "the session has no turn that was delivered")
    return web.Response(body=made[1], content_type="application/octet-stream")


async def delete(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """Give the session up: no sample, its group member fails, and a turn that is open is cancelled at the engine."""
    await server.endings.abandon(session, "deleted by its client")
    return web.Response(status=204)


async def events(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """Server-sent events: the session's facts as they stand in the log, each with its position as id. The stream goes
    on until the session is over, and can be taken up again after the last id that was seen."""
    given = request.headers.get("Last-Event-ID") or request.query.get("after") or str(session.opened_at - 1)
    if (after := _natural(given)) < 0:
        raise invalid("'after' must be a position in the log", "after")
    follow = request.query.get("follow", "true")
    if follow not in ("true", "false"):
        raise invalid("'follow' must be true or false", "follow")
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    end: int | None = None
    try:
        async with contextlib.aclosing(server.feed.listen(session.session_id, after)) as told:
            async for event in told:
                if event is not None:
                    await response.write(_server_sent(event))
                elif follow == "false" or (end is not None and server.feed.position >= end):
                    break
                else:
                    await response.write(b":\n\n")  # finds out whether anybody is there
                if end is None and session.ended.is_set():
                    end = await server.feed.log.tail()
        await response.write_eof()
    except ConnectionError:
        break_off(request)
    return response


def _server_sent(event: Recorded) -> bytes:
    body = encode_body(event.body) if event.body is not None else b"null"
    head = {"position": event.position, "type": event.envelope.type, "wall_s": event.envelope.wall_s}
    data = orjson.dumps({**head, "body": orjson.Fragment(body)})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.position, event.envelope.type.encode(), data)


ROUTES = (
    Route(
        "POST", "/sessions", open_session, "staff", "Open a session", takes=OpenSession, gives=Opened,
        statuses=(409, 410, 429, 502, 503),
    ),
    Route("GET", "/sessions/{id}", view, "session", "What is committed of a session", gives=SessionView),
    Route(
        "GET", "/sessions/{id}/events", events, "session", "What happens to a session", gives="text/event-stream",
        query=EventsQuery,
    ),
    Route(
        "POST", "/sessions/{id}/reward", reward, "session", "Record a reward", takes=Reward, gives=Reward,
        statuses=(409, 503), over=409,
    ),
    Route(
        "POST", "/sessions/{id}/finish", finish, "session", "End a session with its sample", takes=Finish,
        gives=Finished, statuses=(409, 422, 503, 504, 507), finished_again=True,
    ),
    Route(
        "GET", "/sessions/{id}/samples", samples, "session", "The frame that the session would give now",
        gives="application/octet-stream", query=SamplesQuery, statuses=(422,),
    ),
    Route(
        "DELETE", "/sessions/{id}", delete, "session", "Give a session up: no sample", statuses=(204, 503, 504),
    ),
)  # fmt: skip
