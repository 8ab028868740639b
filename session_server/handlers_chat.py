"""Turns over HTTP: chat completions (whole and streamed) and the token-level generate.

Invariant: finish_reason and [DONE] go out after the commit; a turn counts as delivered when its answer was written in
full to a connection that was still open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import orjson
from aiohttp import web

from segue.errors import SegueError
from session_server.answers import TextStream
from session_server.asks import Marks, find_earlier
from session_server.attempt import Attempt
from session_server.chat_api import (
    ChatBody,
    completion,
    delta_chunk,
    event,
    final_chunks,
    parse_chat,
    parse_object,
    usage,
)
from session_server.graph import Delivered, Node
from session_server.http_errors import as_request_error, error_body
from session_server.messages import invalid
from session_server.sampling import parse_sampling, refuse_control_fields
from session_server.server import Server, digest_body
from session_server.sessions import Session

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"
}  # fmt: skip
_JSON = "application/json"


async def chat_completions(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    data = await request.read()
    session = server.sessions.open_for_turns(session.session_id)
    opened = session.opened
    body = parse_chat(
        data, purpose=opened.purpose, temperature=opened.temperature, renders_tools=server.family.renders_tools
    )
    marks = _marks(request, digest_body("chat", data))
    earlier = find_earlier(session, marks)
    if earlier is None:
        earlier = server.turns.start(server.asks.chat(session, body, marks))
    else:
        server.metrics.retries.inc()
    if body.stream:
        return await _stream(server, request, earlier, body)
    node = await _node_of(server, request, earlier)
    return await _deliver(request, node, completion(node, body, server.family.text))


async def generate(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """{input_ids, max_new_tokens?, ...} -> {turn_id, output_ids, logprobs, text, finish_reason, usage}."""
    data = await request.read()
    session = server.sessions.open_for_turns(session.session_id)
    body = parse_object(data)
    refuse_control_fields(body, allowed=("input_ids",))
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise invalid("'input_ids' must be a list of token ids, not empty", "input_ids")
    renamed = {**body, "max_tokens": body.get("max_new_tokens", body.get("max_tokens"))}
    sampling = parse_sampling(renamed, purpose=session.opened.purpose, temperature=session.opened.temperature)
    marks = _marks(request, digest_body("generate", data))
    earlier = find_earlier(session, marks) or server.turns.start(server.asks.tokens(session, ids, sampling, marks))
    node = await _node_of(server, request, earlier)
    tokens = node.tokens
    answer = {
        "turn_id": node.turn_id, "output_ids": tokens.output.tolist(), "logprobs": tokens.logprobs.tolist(),
        "text": server.family.text.decode(tokens.output.tolist()), "finish_reason": node.finish_reason,
        "weight_versions": tokens.spans, "usage": usage(node),
    }  # fmt: skip
    return await _deliver(request, node, orjson.dumps(answer))


def _marks(request: web.Request, digest: str) -> Marks:
    headers = request.headers
    count = headers.get("x-stainless-retry-count", "0")
    return Marks(digest, headers.get("Idempotency-Key", ""), count.isdecimal() and int(count) > 0)


async def _node_of(server: Server, request: web.Request, earlier: Node | Attempt) -> Node:
    """The committed turn, waited for if it is still being generated."""
    if isinstance(earlier, Node):
        return earlier
    earlier.watchers.append(lambda: _connected(request))
    begun = server.clock.mono_s()
    try:
        node = await asyncio.shield(earlier.done)
    except SegueError as error:
        server.metrics.turns.labels(str(as_request_error(error).status)).inc()
        raise
    _count(server, node, begun)
    return node


def _count(server: Server, node: Node, begun: float) -> None:
    metrics = server.metrics
    metrics.turns.labels(node.finish_reason).inc()
    metrics.turn_s.observe(server.clock.mono_s() - begun)
    metrics.tokens.inc(len(node.tokens.output))
    metrics.parts.inc(node.parts - 1)


def _connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _deliver(request: web.Request, node: Node, body: bytes) -> web.StreamResponse:
    response = web.Response(body=body, content_type=_JSON)
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        return response
    if _connected(request):
        node.delivered = Delivered.YES
    return response


async def _stream(server: Server, request: web.Request, earlier: Node | Attempt, body: ChatBody) -> web.StreamResponse:
    """Deltas as the engine makes them. An error before the first byte has its JSON status, a later one is an event."""
    text = server.family.text
    deltas = TextStream(text, body.sampling.stop)
    created_s = earlier.created_s if isinstance(earlier, Node) else int(server.clock.wall_s())
    turn_id = earlier.turn_id
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    live = server.ctx.config.rollout.partial and not body.use_tools
    if isinstance(earlier, Attempt):
        earlier.watchers.append(lambda: _connected(request))
        while live and not earlier.done.done():
            changed = earlier.changed
            if earlier.output and (piece := deltas.feed(earlier.output)):
                if not response.prepared:
                    await _begin(request, response, turn_id, created_s, body)
                await response.write(delta_chunk(turn_id, created_s, body, {"content": piece}))
            await changed.wait()
    begun = server.clock.mono_s()
    try:
        node = earlier if isinstance(earlier, Node) else await asyncio.shield(earlier.done)
        rest = deltas.rest(str(node.messages[-1].raw["content"]))
    except (SegueError, ValueError) as error:
        if not response.prepared:
            raise
        await response.write(event(orjson.dumps(error_body(as_request_error(error)))))
        return response
    if isinstance(earlier, Attempt):
        _count(server, node, begun)
    if not response.prepared:
        await _begin(request, response, turn_id, created_s, body)
    await _write_all(response, final_chunks(node, created_s, body, rest, text))
    if _connected(request):
        node.delivered = Delivered.YES
    return response


async def _begin(
    request: web.Request, response: web.StreamResponse, turn_id: str, created_s: int, body: ChatBody
) -> None:
    await response.prepare(request)
    await response.write(delta_chunk(turn_id, created_s, body, {"role": "assistant", "content": ""}))


async def _write_all(response: web.StreamResponse, chunks: Iterable[bytes]) -> None:
    await response.write(b"".join(chunks))
    await response.write_eof()
