"""The load generator: closed loops over keep-alive connections, requests encoded beforehand, no HTTP library.

It runs in the benchmark's own process, apart from every contestant, and costs each of them the same.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from rig.engine import Canned, prose


@dataclass(frozen=True, slots=True)
class Outcome:
    """latencies_s: of each request, in the order of completion; wall_s: from the first to the last."""

    latencies_s: list[float]
    wall_s: float

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.wall_s

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def p50_ms(self) -> float:
        return 1000 * statistics.median(self.latencies_s)


def request(url: str, path: str, body: bytes, *, method: str = "POST", token: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    if token:
        head += f"Authorization: Bearer {token}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Loop(asyncio.Protocol):
    """One connection: sends the next request when the answer to the last is whole."""

    def __init__(self, requests: Iterator[bytes], latencies_s: list[float], keep: list[bytes] | None) -> None:
        self._requests, self._latencies, self._keep = requests, latencies_s, keep
        self._data = bytearray()
        self._need = -1  # bytes of the whole answer, 0 if it is chunked, -1 if not known yet
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def start(self) -> None:
        sending = next(self._requests, None)
        if sending is None:
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)
            return
        self._sent = time.perf_counter()
        self._transport.write(sending)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._need < 0 and not self._read_head():
            return
        if len(self._data) < self._need or (self._need == 0 and not self._data.endswith(b"0\r\n\r\n")):
            return
        self._latencies.append(time.perf_counter() - self._sent)
        if self._keep is not None:
            self._keep.append(bytes(self._data[self._data.index(b"\r\n\r\n") + 4 :]))
        self._data.clear()
        self._need = -1
        self.start()

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._data[:end]).lower()
        if not head.startswith((b"http/1.1 200", b"http/1.1 204")):
            self.done.set_exception(RuntimeError(f"the contestant answered {bytes(self._data[:2000])!r}"))
            self._transport.close()
            return False
        at = head.find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        self._need = 0 if b"transfer-encoding: chunked" in head else end + 4 + size
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the contestant closed the connection"))


async def drive(
    url: str, streams: Iterable[Iterator[bytes]], *, keep: list[bytes] | None = None, limit_s: float = 240.0
) -> Outcome:
    """Play each stream of requests over a connection of its own; `keep` gets the bodies of the answers."""
    address = urlsplit(url)
    latencies_s: list[float] = []
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s):
        made = [
            await loop.create_connection(lambda s=stream: _Loop(s, latencies_s, keep), address.hostname, address.port)
            for stream in streams
        ]
        begun = time.perf_counter()
        for _, protocol in made:
            protocol.start()
        for _, protocol in made:
            await protocol.done
    return Outcome(latencies_s, time.perf_counter() - begun)


async def call(url: str, requests: Iterable[bytes], *, connections: int = 16) -> list[bytes]:
    """Send requests whose time does not count; their bodies, in no special order."""
    shared, kept = iter(list(requests)), list[bytes]()
    await drive(url, [shared for _ in range(connections)], keep=kept)
    return kept


def chat_body(messages: list[dict[str, str]], tokens: int) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, "max_tokens": tokens})


class Conversations:
    """Bodies of a conversation of `turns` turns, `tokens` + `tokens` each; the assistant says what the canned engine
    does, so that they can be encoded beforehand."""

    def __init__(self, model: Path, turns: int, tokens: int) -> None:
        answer = Canned(model, 48, 8).text(tokens)
        messages: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        for number in range(turns):
            messages.append({"role": "user", "content": prose(tokens - 14, seed=number)})
            self.bodies.append(chat_body(messages, tokens))
            messages.append({"role": "assistant", "content": answer})

    def play(self, url: str, places: Iterator[tuple[str, str]]) -> Iterator[bytes]:
        """The conversation at each (path, token) of `places`, one after another."""
        for path, token in places:
            for body in self.bodies:
                yield request(url, path, body, token=token)
