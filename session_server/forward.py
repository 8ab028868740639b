"""Requests for another server's session are passed on, one hop, never redirected: HTTP clients drop the
Authorization header when the origin changes."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from segue.errors import RequestError
from session_server.server import Server

HOP = "X-Segue-Forwarded"
_DROPPED = {
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "content-encoding",
    "server",
    "date",
}


async def forward(server: Server, request: web.Request, owner: int) -> web.StreamResponse:
    """The owner's answer, streamed through. Raises RequestError 502 if it does not answer."""
    if HOP in request.headers:
        raise RequestError(502, "server_error", "forwarded to a server that does not own the session")
    server.metrics.forwarded.inc()
    body = await request.read()
    headers = {k: v for k, v in request.headers.items() if k.lower() not in _DROPPED} | {HOP: "1"}
    url = server.ctx.endpoints.session_urls[owner] + request.path_qs
    timeout = aiohttp.ClientTimeout(total=server.ctx.config.rollout.turn_deadline_s + 30)
    response: web.StreamResponse | None = None
    try:
        async with server.http.request(request.method, url, data=body, headers=headers, timeout=timeout) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _DROPPED}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
    except (aiohttp.ClientError, TimeoutError) as error:
        if response is not None and response.prepared:
            raise  # half an answer is out: the connection breaks, and the client asks again
        raise RequestError(502, "server_error", f"session server {owner} does not answer") from error
