"""The connections to engines: whole answers whatever their cut, nothing kept that is not clean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from session_server import engine_http
from session_server.engine_http import Broken, Connections

BODY = bytes(range(256)) * 700
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\nA\r\n, engines \r\n0\r\n\r\n"


class Engine:
    """Answers each request with the next of `answers`, written in the given pieces; None, or an empty piece, closes."""

    def __init__(self, answers: list[list[bytes] | None]) -> None:
        self.answers, self.seen, self.connections, self.closed = answers, list[bytes](), 0, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.seen.append(await reader.readexactly(size))
                pieces = self.answers.pop(0)
                if pieces is None:
                    break
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if b"Connection: close" in pieces[0] or not pieces[-1]:
                    break
        writer.close()
        self.closed.set()


@contextlib.asynccontextmanager
async def engine(*answers: list[bytes] | None) -> AsyncIterator[tuple[Engine, Callable[[], object], Connections, str]]:
    made, connections = Engine(list(answers)), Connections()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    try:
        yield made, server.close, connections, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        connections.close()
        server.close()
        await asyncio.wait_for(server.wait_closed(), 5)
        await asyncio.sleep(0)


@pytest.mark.parametrize("cut", [1, 7, 30, len(PLAIN) - len(BODY), len(PLAIN) - len(BODY) + 1, 100_000])
async def test_an_answer_is_whole_wherever_it_is_cut(cut: int) -> None:
    async with engine([PLAIN[:cut], PLAIN[cut:]], [PLAIN]) as (made, _, connections, url):
        assert await connections.post(url, "/generate", b"one") == (200, BODY)
        assert await connections.post(url, "/generate", b"two") == (200, BODY)
        assert made.seen == [b"one", b"two"]
        assert made.connections == 1


@pytest.mark.parametrize("cut", range(1, len(CHUNKED), 5))
async def test_chunks_are_joined_wherever_they_are_cut(cut: int) -> None:
    async with engine([CHUNKED[:cut], CHUNKED[cut:]], [PLAIN]) as (made, _, connections, url):
        assert await connections.post(url, "/generate", b"") == (200, b"hello, engines ")
        assert await connections.post(url, "/generate", b"") == (200, BODY)
        assert made.connections == 1


async def test_an_answer_without_size_ends_with_its_connection() -> None:
    async with engine([b"HTTP/1.1 503 Busy\r\nConnection: close\r\n\r\nlater", b" maybe"]) as (_, _, connections, url):
        assert await connections.post(url, "/generate", b"") == (503, b"later maybe")


async def test_a_connection_that_the_engine_wants_closed_is_not_used_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    async with engine([closing], [PLAIN]) as (made, _, connections, url):
        assert await connections.post(url, "/generate", b"") == (200, b"ok")
        assert await connections.post(url, "/generate", b"") == (200, BODY)
        assert made.connections == 2


@pytest.mark.parametrize(
    "said",
    [
        [PLAIN[:-1], b""], [b"SSH-2.0-nothing of yours\r\n\r\n"], None, [b"x" * 70_000],
        [b"HTTP/1.1 200 OK\r\nContent-Length: lots\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ntwo"],
    ],
)  # fmt: skip
async def test_half_answers_and_foreign_ones_break_the_exchange_and_the_connection(said: list[bytes] | None) -> None:
    async with engine(said, [PLAIN]) as (made, _, connections, url):
        with pytest.raises(Broken):
            await asyncio.wait_for(connections.post(url, "/generate", b""), 2)
        assert await connections.post(url, "/generate", b"") == (200, BODY)
        assert made.connections == 2


async def test_a_cancelled_exchange_closes_its_connection() -> None:
    async with engine([b"HTTP/1.1 200 OK\r\n"]) as (made, _, connections, url):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.post(url, "/generate", b"")
        async with asyncio.timeout(2):
            await made.closed.wait()


async def test_a_connection_that_was_idle_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine([PLAIN], [PLAIN]) as (made, _, connections, url):
        await connections.post(url, "/generate", b"")
        monkeypatch.setattr(engine_http, "IDLE_S", 0.0)
        await connections.post(url, "/generate", b"")
        assert made.connections == 2


async def test_nobody_there_is_an_os_error() -> None:
    async with engine() as (_, close, connections, url):
        close()
        with pytest.raises(OSError):
            await connections.post(url, "/generate", b"")
        with pytest.raises(OSError):
            await connections.post("nowhere", "/generate", b"")
