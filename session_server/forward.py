"""Requests for another server's session are passed on, one hop, never redirected: HTTP clients drop the
Authorization header when the origin changes.

Invariant: what belongs to one connection (hop-by-hop headers, lengths and codings of the transfer, Server and Date)
stays on it; each side sets its own, once.
"""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from segue.errors import RequestError
from session_server.requests import body_of, break_off
from session_server.server import Server

HOP = "X-Segue-Forwarded"
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "content-length",
    }
)  # fmt: skip
_OF_REQUEST = _HOP_BY_HOP | {"host", "expect", "content-encoding", HOP.lower()}
"""A body that came encoded was decoded when it was read."""
_OF_ANSWER = _HOP_BY_HOP | {"server", "date"}


async def forward(server: Server, request: web.Request, owner: int) -> web.StreamResponse:
    """The owner's answer, streamed through. Raises RequestError 502 if it does not answer."""
    if HOP in request.headers:
        raise RequestError(502, "server_error", "forwarded to a server that does not own the session")
    server.metrics.forwarded.inc()
    body = await body_of(request)
    headers = passed_on(request.headers, _OF_REQUEST)
    headers[HOP] = "1"
    url = server.ctx.endpoints.session_urls[owner] + request.path_qs
    timeout = aiohttp.ClientTimeout(total=server.ctx.config.rollout.turn_deadline_s + 30)
    response: web.StreamResponse | None = None
    try:
        async with server.http.request(
            request.method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers, _OF_ANSWER))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        if response is not None and response.prepared:
            break_off(request)  # half an answer is out: the client asks again
            return response
        raise RequestError(502, "server_error", f"session server {owner} does not answer") from error


def passed_on(headers: CIMultiDictProxy[str], dropped: Iterable[str]) -> CIMultiDict[str]:
    """`headers` without those `dropped` and those that their own Connection header names."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    unwanted = named.union(dropped)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in unwanted)
