"""What a client that is slow, gone or hostile may cost: the time that its bytes may take.

Invariants: no request holds anything for longer than BODY_S before its body is there; no connection holds an answer for
longer than its reader's patience; one that is broken off is never written to again.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from segue.errors import RequestError

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"
}  # fmt: skip
BODY_S = 30.0
"""A whole body has to arrive within this time."""


async def body_of(request: web.Request) -> bytes:
    """The request's body. Raises RequestError 408 if it does not come in time, 413 if it is too large."""
    if request.content.is_eof():  # it came with the headers
        return await request.read()
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise RequestError(408, "timeout_error", f"the body did not come within {BODY_S:g} s") from error


def connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def break_off(request: web.Request) -> None:
    """End the connection: after a part of an answer that cannot be completed."""
    if request.transport is not None:
        request.transport.abort()
