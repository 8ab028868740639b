"""Whether the process lives, told by a thread of its own: an event loop that is busy cannot keep it from answering.

Invariants: it needs nothing of the loop but the time of its last beat; it answers one connection after the other, and
none holds it longer than CLIENT_S; its answer is the measured truth: a loop that has stood still for STUCK_S is not
alive, and only then is the answer 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

BEAT_S = 0.25
CLIENT_S = 0.5
STUCK_S = 60.0
_ACCEPT_S = 0.2


class Heart:
    """The loop's pulse."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    @property
    def lag_s(self) -> float:
        """How long the loop is late, in seconds."""
        return max(0.0, time.monotonic() - self._last - BEAT_S)

    async def beat(self) -> None:
        """For ever."""
        while True:
            self._last = time.monotonic()
            await asyncio.sleep(BEAT_S)


@contextlib.contextmanager
def liveness(heart: Heart, host: str, port: int, *, stuck_s: float = STUCK_S) -> Iterator[str]:
    """Serve `GET /healthz` from a thread; gives its URL. `port` 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=64) as listener:
        listener.settimeout(_ACCEPT_S)
        ended = threading.Event()
        thread = threading.Thread(target=_serve, args=(listener, heart, stuck_s, ended), name="liveness", daemon=True)
        thread.start()
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listener.getsockname()[1]}/healthz"
        finally:
            ended.set()
            thread.join()


def _serve(listener: socket.socket, heart: Heart, stuck_s: float, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            client, _ = listener.accept()
        except OSError:  # nobody came in _ACCEPT_S, or somebody left at once
            continue
        with client, contextlib.suppress(OSError):
            client.settimeout(CLIENT_S)
            client.sendall(_answer(_request_line(client), heart.lag_s, stuck_s))


def _request_line(client: socket.socket) -> bytes:
    """The first line of the request, which is read to the end of its header as far as one deadline lets it."""
    until, data = time.monotonic() + CLIENT_S, b""
    while b"\r\n\r\n" not in data and len(data) < 8192 and time.monotonic() < until:
        piece = client.recv(4096)
        if not piece:
            break
        data += piece
    return data.split(b"\r\n", 1)[0]


def _answer(request_line: bytes, lag_s: float, stuck_s: float) -> bytes:
    if request_line.split(b" ")[:2] != [b"GET", b"/healthz"]:
        status, body = "404 Not Found", b"{}"
    else:
        alive = lag_s < stuck_s
        status = "200 OK" if alive else "503 Service Unavailable"
        body = json.dumps({"status": "ok" if alive else "stuck", "loop_lag_s": round(lag_s, 3)}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode() + b"\r\n\r\n" + body
