"""The session server's way to engines and to the router. Decides nothing; every call has a deadline.

Whatever goes wrong on the way is EngineUnavailable (ask another engine, or again); an answer that is wrong is
EngineError and never retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from segue.errors import EngineError, EngineUnavailable
from segue.wire.engine import (
    ABORT_PATH,
    GENERATE_PATH,
    STREAM_END,
    EventSplitter,
    GenerateAnswer,
    GenerateRequest,
    RouteShape,
    decode_answer,
    encode_abort,
    encode_request,
    error_of,
)
from session_server.engine_http import Answer, Connections

ABORT_DEADLINE_S = 10.0
ROUTER_DEADLINE_S = 10.0
_JSON = {"Content-Type": "application/json"}
_LOST = (aiohttp.ClientError, TimeoutError, OSError)


class Assignment(msgspec.Struct, frozen=True):
    """The engine that a session talks to, as the router says."""

    engine_id: str
    incarnation: str
    url: str
    version: int


class _Progress(msgspec.Struct):
    output_ids: list[int]


_ASSIGNMENTS = msgspec.json.Decoder(Assignment)
_PROGRESS = msgspec.json.Decoder(_Progress)


@dataclass(frozen=True, slots=True)
class EngineClient:
    """`request_deadline_s` bounds one request part. `routes`: shape of route rows if R3 is on. `http` is for streams,
    `connections` for everything else."""

    http: aiohttp.ClientSession
    connections: Connections
    request_deadline_s: float
    routes: RouteShape | None = None

    async def generate(
        self, url: str, request: GenerateRequest, on_progress: Callable[[list[int]], None] | None = None
    ) -> GenerateAnswer:
        """One request part, whole, bounded by the caller. With `request.stream`, `on_progress` gets the output ids so
        far, as they come, for `request_deadline_s` at most; if the stream breaks, what had come is the answer,
        unfinished. Raises EngineUnavailable, EngineError."""
        body: bytes | bytearray
        if request.stream:
            body = await self._stream(url, request, on_progress)
        else:
            status, body = await self._post(url, GENERATE_PATH, encode_request(request))
            if status != 200:
                raise error_of(status, body, url)
        return decode_answer(body, request, routes=self.routes)

    async def abort(self, url: str, rid: str) -> None:
        """Ask the engine to end the request; the request's own call returns what there is. Raises EngineUnavailable."""
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                await self._post(url, ABORT_PATH, encode_abort(rid))
        except TimeoutError as error:
            raise EngineUnavailable(f"{url} does not answer an abort") from error

    async def _post(self, url: str, path: str, body: bytes) -> Answer:
        try:
            return await self.connections.post(url, path, body)
        except OSError as error:
            raise EngineUnavailable(f"{url}: {type(error).__name__} {error}".strip()) from error

    async def _stream(
        self, url: str, request: GenerateRequest, on_progress: Callable[[list[int]], None] | None
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self.request_deadline_s)
        events = _Events(on_progress)
        try:
            async with self.http.post(
                url + GENERATE_PATH, data=encode_request(request), headers=_JSON, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise error_of(response.status, await response.read(), url)
                return await events.last_of(response)
        except _LOST as error:
            if not events.last:
                raise EngineUnavailable(f"{url}: {type(error).__name__} {error}".strip()) from error
            return events.last


class _Events:
    """Reads a stream of cumulative events; `last` is the newest one."""

    def __init__(self, on_progress: Callable[[list[int]], None] | None) -> None:
        self.last = b""
        self._on_progress = on_progress

    async def last_of(self, response: aiohttp.ClientResponse) -> bytes:
        splitter = EventSplitter()
        async for chunk in response.content.iter_any():
            events = splitter.feed(chunk)
            ended = STREAM_END in events
            if ended:
                events = events[: events.index(STREAM_END)]
            if events:
                self.last = events[-1]
                self._report()
            if ended and self.last:
                return self.last
        raise aiohttp.ClientPayloadError("the stream ended without its last event")

    def _report(self) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(_PROGRESS.decode(self.last).output_ids)
        except msgspec.MsgspecError as error:
            raise EngineError(f"stream event does not decode: {error}: {self.last[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class RouterClient:
    http: aiohttp.ClientSession
    url: str
    token: str

    async def assign(self, session_id: str, exclude: Sequence[str]) -> Assignment | None:
        """An engine for the session, None while none is admitted or the router is away. Raises EngineError."""
        body = {"session_id": session_id, "exclude": list(exclude)}
        try:
            status, data = await self._post("/assign", body)
        except _LOST:
            return None
        if status in (502, 503, 504):
            return None
        if status != 200:
            raise error_of(status, data, f"router {self.url}")
        try:
            return _ASSIGNMENTS.decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"router {self.url}: assignment does not decode: {error}") from error

    async def release(self, session_id: str) -> None:
        """Tell the router that the session is over; a router that is away forgets it by itself."""
        try:
            await self._post("/release", {"session_id": session_id})
        except _LOST:
            return

    async def _post(self, path: str, body: object) -> tuple[int, bytes]:
        headers = {**_JSON, "Authorization": f"Bearer {self.token}"}
        timeout = aiohttp.ClientTimeout(total=ROUTER_DEADLINE_S)
        data = msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data, headers=headers, timeout=timeout) as response:
            return response.status, await response.read()


async def assign_until(router: RouterClient, session_id: str, exclude: Sequence[str]) -> Assignment:
    """Ask until some engine is assigned; bounded by the caller's deadline. The last failed engines are tried again
    when no other is admitted."""
    pause_s = 0.05
    avoid: Sequence[str] = exclude
    while True:
        assignment = await router.assign(session_id, avoid)
        if assignment is not None:
            return assignment
        if avoid:
            avoid = ()
            continue
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
