"""Turns over HTTP, in every dialect, whole and streamed; and the token-level generate.

Invariant: finish_reason and the stream's last event go out after the commit; a turn counts as delivered when its answer
was written in full to a connection that was still open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import orjson
from aiohttp import web

from segue.errors import SegueError
from session_server.answers import Delta, Shown
from session_server.asks import Marks, find_earlier
from session_server.attempt import Attempt
from session_server.bodies import (
    ChatAnswer,
    ChatRequest,
    Generate,
    Generated,
    MessagesAnswer,
    MessagesBody,
    ResponseAnswer,
    ResponseBody,
)
from session_server.chat_api import parse_chat, usage
from session_server.dialect import Dialect, Head, Terms, parse_object
from session_server.facts import undisturbed
from session_server.graph import Delivered, Node
from session_server.http_errors import as_request_error
from session_server.messages import invalid
from session_server.messages_api import parse_messages_request
from session_server.requests import STREAM_HEADERS, body_of, break_off, connected
from session_server.responses_api import parse_response_request
from session_server.routes import Route
from session_server.sampling import Cuts, parse_sampling, refuse_control_fields
from session_server.server import Server, digest_body
from session_server.sessions import Session

_JSON = "application/json"
MAX_KEY = 256


async def chat_completions(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """One turn as an OpenAI chat completion."""
    return await _turn(server, request, session, "chat", parse_chat)


async def responses(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """One turn as an OpenAI response."""
    return await _turn(server, request, session, "responses", parse_response_request)


async def messages(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """One turn as an Anthropic message."""
    return await _turn(server, request, session, "messages", parse_messages_request)


async def _turn(
    server: Server, request: web.Request, session: Session, kind: str, parse: Callable[[bytes, Terms], Dialect]
) -> web.StreamResponse:
    data = await body_of(request)
    session = server.sessions.open_for_turns(session.session_id)
    opened = session.opened
    cuts = Cuts.of(server.ctx.config.rollout)
    asked = parse(data, Terms(opened.purpose, opened.temperature, server.family.renders_tools, session.graph, cuts))
    marks = _marks(request, digest_body(kind, data))
    earlier = find_earlier(session, marks)
    if earlier is None:
        earlier = server.turns.start(server.asks.chat(session, asked.turn, marks))
    else:
        server.metrics.retries.inc()
    if asked.turn.stream:
        return await _stream(server, request, earlier, asked)
    node = await _node_of(server, request, earlier)
    return await _deliver(request, node, asked.whole(node, server.family.text))


async def generate(server: Server, request: web.Request, session: Session) -> web.StreamResponse:
    """{input_ids, max_new_tokens?, ...} -> {turn_id, output_ids, logprobs, text, finish_reason, usage}."""
    data = await body_of(request)
    session = server.sessions.open_for_turns(session.session_id)
    body = parse_object(data)
    refuse_control_fields(body, allowed=("input_ids",))
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise invalid("'input_ids' must be a list of token ids, not empty", "input_ids")
    renamed = {**body, "max_tokens": body.get("max_new_tokens", body.get("max_tokens"))}
    sampling = parse_sampling(
        renamed, purpose=session.opened.purpose, temperature=session.opened.temperature,
        cuts=Cuts.of(server.ctx.config.rollout),
    )  # fmt: skip
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
    count, key = headers.get("x-stainless-retry-count", ""), headers.get("Idempotency-Key", "")
    if key and (len(key) > MAX_KEY or not key.isascii() or not key.isprintable()):
        raise invalid(f"the key must be at most {MAX_KEY} printable characters", "Idempotency-Key")
    return Marks(digest, key, count.isdecimal() and count.strip("0") != "")


async def _node_of(server: Server, request: web.Request, earlier: Node | Attempt) -> Node:
    """The committed turn, waited for if it is still being generated."""
    if isinstance(earlier, Node):
        return earlier
    earlier.watchers.append(lambda: connected(request))
    begun = server.clock.mono_s()
    try:
        node = await undisturbed(earlier.done)
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


async def _deliver(request: web.Request, node: Node, body: bytes) -> web.StreamResponse:
    response = web.Response(body=body, content_type=_JSON)
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        return response
    if connected(request):
        node.delivered = Delivered.YES
    return response


async def _stream(server: Server, request: web.Request, earlier: Node | Attempt, asked: Dialect) -> web.StreamResponse:
    """Deltas as the engine makes them. An error before the first byte has its JSON status, a later one is an event."""
    if isinstance(earlier, Node):
        head = Head(earlier.turn_id, earlier.created_s, earlier.prompt_tokens)
    else:
        ask = earlier.ask
        before = ask.parent.total_tokens if ask.parent is not None else 0
        head = Head(earlier.turn_id, int(server.clock.wall_s()), before + len(ask.prompt))
    events, shown = asked.stream(head), Shown()
    response = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        if isinstance(earlier, Attempt):
            async for delta in _live(server, request, earlier, asked):
                begin = b"" if response.prepared else await _begin(request, response, events.begin())
                await response.write(begin + events.delta(shown.add(delta)))
        try:
            node = await _node_of(server, request, earlier)
            rest = b"".join([events.delta(delta) for delta in shown.rest(node.messages[-1].raw)])
        except (SegueError, ValueError) as error:
            if not response.prepared:
                raise
            await response.write(events.failed(as_request_error(error)))
            return response
        begin = b"" if response.prepared else await _begin(request, response, events.begin())
        await response.write(begin + rest + events.end(node, server.family.text))
        await response.write_eof()
    except ConnectionError:
        break_off(request)
        return response
    if connected(request):
        node.delivered = Delivered.YES
    return response


async def _begin(request: web.Request, response: web.StreamResponse, first: bytes) -> bytes:
    await response.prepare(request)
    return first


async def _live(server: Server, request: web.Request, attempt: Attempt, asked: Dialect) -> AsyncIterator[Delta]:
    """Pieces of the answer while it is made; nothing where they would have to be taken back if a pause cut the turn."""
    if not server.ctx.config.rollout.partial:
        return
    turn = asked.turn
    prompt = attempt.ask.prompt.tolist()
    deltas = server.family.format.stream(
        turn.sampling.stop, prompt=prompt, tools=turn.use_tools, turn_id=attempt.turn_id
    )
    attempt.watchers.append(lambda: connected(request))
    while not attempt.done.done():
        changed = attempt.changed
        for delta in deltas.feed(attempt.output):
            yield delta
        await changed.wait()


_TURN = (409, 429, 503, 504, 507)
ROUTES = (
    Route(
        "POST", "/sessions/{id}/v1/chat/completions", chat_completions, "session", "A turn in chat completions",
        takes=ChatRequest, gives=ChatAnswer, statuses=_TURN, streams=True,
    ),
    Route(
        "POST", "/sessions/{id}/v1/responses", responses, "session", "A turn in OpenAI's Responses",
        takes=ResponseBody, gives=ResponseAnswer, statuses=_TURN, streams=True,
    ),
    Route(
        "POST", "/sessions/{id}/v1/messages", messages, "session", "A turn in Anthropic's Messages",
        takes=MessagesBody, gives=MessagesAnswer, statuses=_TURN, streams=True,
    ),
    Route(
        "POST", "/sessions/{id}/generate", generate, "session", "A turn of tokens",
        takes=Generate, gives=Generated, statuses=_TURN,
    ),
)  # fmt: skip
