"""One HTTP/1.1 exchange after another over kept connections: what a call to an engine needs, and nothing else.

A general client took a third of a turn's time. Invariants: a connection carries one exchange at a time and is kept
only after a whole answer; a cancelled exchange closes its connection, which is how an engine learns that nobody waits;
a kept connection is used again only within IDLE_S, so that a server which closes idle ones is not met halfway. Answers
are read straight into one buffer of their announced size. Every deadline is the caller's.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

IDLE_S = 4.0
"""Less than the five seconds after which uvicorn, SGLang's server, closes an idle connection."""
MAX_HEAD_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 4 * 1024**3

type Answer = tuple[int, bytes | bytearray]
"""HTTP status and body."""


class Broken(OSError):
    """The connection ended, or said something that is no HTTP/1.1 answer, before the answer was whole."""


class Connections:
    """Kept connections by origin ("http://host:port")."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}

    async def post(self, origin: str, path: str, body: bytes) -> Answer:
        """POST JSON. Raises OSError (Broken is one) for whatever goes wrong on the way."""
        connection = self._kept(origin) or await _connect(origin)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: {connection.host}\r\nContent-Type: application/json\r\n"
            answer = await connection.exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        except BaseException:
            connection.close()
            raise
        if connection.keep():
            self._idle.setdefault(origin, []).append(connection)
        return answer

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _kept(self, origin: str) -> _Connection | None:
        """The one used last: the others grow old and are closed."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.fresh():
                return connection
            connection.close()
            for older in idle:
                older.close()
            idle.clear()
        return None


async def _connect(origin: str) -> _Connection:
    address = urlsplit(origin)
    if address.hostname is None:
        raise Broken(f"'{origin}' is no address")
    secure = address.scheme == "https"
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: _Connection(address.netloc), address.hostname, address.port or (443 if secure else 80),
        ssl=True if secure else None,
    )  # fmt: skip
    return connection


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, host: str) -> None:
        self.host = host
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(MAX_HEAD_BYTES)
        self._answer: asyncio.Future[Answer] | None = None
        self._used_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._filled = 0
        self._status = 0
        self._keep = False
        self._body: bytearray | None = None
        """Of the announced size; None before the head is read, and for answers without a size."""
        self._view = memoryview(self._head)
        self._rest: _Unsized | None = None

    async def exchange(self, request: bytes) -> Answer:
        if self._transport is None:
            raise Broken("the connection is closed")
        self._begin()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def keep(self) -> bool:
        self._used_s = time.monotonic()
        return self._keep and self._transport is not None

    def fresh(self) -> bool:
        return self._transport is not None and time.monotonic() - self._used_s < IDLE_S

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._rest is not None and self._rest.ends_with_connection and error is None:
            self._done(self._rest.body)
        self._fail(f"the connection was lost: {error or 'closed by the engine'}")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._rest is not None:
            self._feed_rest(nbytes)
            return
        self._filled += nbytes
        if self._body is None:
            self._read_head()
        elif self._filled == len(self._body):
            self._done(self._body)

    def _read_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == MAX_HEAD_BYTES:
                self._fail("the answer's head does not end")
            return
        lines = bytes(self._head[:end]).lower().split(b"\r\n")
        if self._answer is None or not lines[0].startswith(b"http/1.") or not lines[0][9:12].isdigit():
            self._fail(f"no HTTP/1.1 answer: {lines[0][:80]!r}")
            return
        headers = dict(line.partition(b":")[::2] for line in lines[1:])
        self._status = int(lines[0][9:12])
        self._keep = headers.get(b"connection", b"").strip() != b"close" and lines[0][7:8] == b"1"
        size = headers.get(b"content-length", b"").strip()
        chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        begun = bytes(self._head[end + 4 : self._filled])
        if chunked or not size:
            self._rest, self._filled = _Unsized(chunked), 0
            self._keep = self._keep and chunked
            self._head[: len(begun)] = begun
            self._feed_rest(len(begun))
        elif not size.isdigit() or int(size) > MAX_ANSWER_BYTES or len(begun) > int(size):
            self._fail(f"the answer's length is {size!r}")
        else:
            self._body = bytearray(int(size))
            self._body[: len(begun)] = begun
            self._view, self._filled = memoryview(self._body), len(begun)
            if self._filled == len(self._body):
                self._done(self._body)

    def _feed_rest(self, nbytes: int) -> None:
        assert self._rest is not None
        try:
            whole = self._rest.feed(bytes(self._head[:nbytes]))
        except ValueError as error:
            self._fail(f"the answer's chunks are malformed: {error}")
            return
        if whole:
            self._done(self._rest.body)

    def _done(self, body: bytes | bytearray) -> None:
        answer, self._answer = self._answer, None
        # The body belongs to the caller from here on: nothing may be read into it.
        self._body, self._rest, self._view, self._filled = None, None, memoryview(self._head), 0
        if answer is not None and not answer.done():
            answer.set_result((self._status, body))

    def _fail(self, why: str) -> None:
        answer, self._answer, self._keep = self._answer, None, False
        if answer is not None and not answer.done():
            answer.set_exception(Broken(why))
        self.close()


class _Unsized:
    """A body in chunks, or one that ends with its connection."""

    def __init__(self, chunked: bool) -> None:
        self.ends_with_connection = not chunked
        self.body = bytearray()
        self._data = bytearray()
        self._need: int | None = None
        """What is missing of the chunk at hand, its line end included; None between two chunks."""

    def feed(self, data: bytes) -> bool:
        """Whether the body is whole. Raises ValueError for what is no chunk."""
        if self.ends_with_connection:
            self.body += data
            return False
        self._data += data
        while True:
            if self._need is None:
                line, found, rest = self._data.partition(b"\r\n")
                if not found:
                    return False
                self._need, self._data = int(bytes(line).split(b";")[0], 16) + 2, rest
            if self._need == 2:  # the last one; trailers may follow
                return bytes(self._data).startswith(b"\r\n") or b"\r\n\r\n" in self._data
            if len(self._data) < self._need:
                return False
            self.body += self._data[: self._need - 2]
            del self._data[: self._need]
            self._need = None
