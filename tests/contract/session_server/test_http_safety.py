"""Slow, half-open, too many and hostile clients: they get what they deserve, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
import urllib.request
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from dialect_rig import speaking
from multidict import CIMultiDict, CIMultiDictProxy
from session_server_rig import make_config

from segue.config.schema import SessionServer
from session_server import connections, requests
from session_server.forward import passed_on
from session_server.liveness import Heart, liveness


async def raw(rig, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(data)
    return reader, writer


def post(session, path: str, length: int, body: bytes = b"", more: str = "") -> bytes:
    head = (
        f"POST {session.path}{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.opened['token']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n"
    )
    return head.encode() + body


async def test_a_body_that_comes_byte_by_byte_is_given_up_and_holds_nobody(rig_of, engine, monkeypatch):
    monkeypatch.setattr(requests, "BODY_S", 0.5)
    async with rig_of(engine) as rig:
        slow, other = await rig.open(), await rig.open()
        reader, writer = await raw(rig, post(slow, "/v1/chat/completions", 500, b"{"))
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        while not answer.done():
            await other.chat("w1", max_tokens=2)
            writer.write(b" ")
        assert b" 408 " in await answer
        assert (await slow.view())["turns"] == []
        writer.close()


async def test_a_body_in_pieces_is_read_whole(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        body = json.dumps({"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}).encode()
        reader, writer = await raw(rig, post(session, "/v1/chat/completions", len(body), body[:5]))
        await asyncio.sleep(0.05)
        writer.write(body[5:])
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_a_client_that_stops_reading_is_broken_off(rig_of, spelling, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.3)
    async with speaking(rig_of, spelling, "a" * 390) as (rig, _engine):
        session, other = await rig.open(), await rig.open()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "model": "m" * 20_000}
        data = json.dumps(body).encode()
        address = urlsplit(rig.url)
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stalled, (address.hostname, address.port))
            await loop.sock_sendall(stalled, post(session, "/v1/chat/completions", len(data), data))
            await rig.until("turn.committed")
            await other.chat("b", max_tokens=3)
            await asyncio.sleep(0.6)
            assert b"[DONE]" not in await _read_to_its_end(loop, stalled)
        again = await session.call("POST", "/v1/chat/completions", {**body, "stream": False})
        assert again["choices"][0]["message"]["content"] == "a" * 390


async def test_connections_beyond_the_limit_are_told_so(rig_of, engine, model):
    async with rig_of(engine, config=make_config(model, session_server=SessionServer(max_connections=4))) as rig:
        open_ones = [await raw(rig, b"") for _ in range(6)]
        answers = [await reader.read() for reader, _ in open_ones[-3:]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        for _, writer in open_ones:
            writer.close()
        await asyncio.sleep(0.05)
        await rig.open()


async def test_too_many_or_too_long_headers_are_refused(rig_of, engine):
    async with rig_of(engine) as rig:
        for headers in ("".join(f"X-{n}: 1\r\n" for n in range(2000)), f"X-Long: {'a' * 100_000}\r\n"):
            reader, writer = await raw(rig, f"GET /healthz HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
            assert b" 400 " in await reader.readline()
            writer.close()
        await rig.open()


async def test_odd_bytes_in_tokens_and_keys_are_refused_as_what_they_are(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        for header, status in (
            (b"Authorization: Bearer \xff\xfe", b" 401 "), (b"x-api-key: \xff", b" 401 "),
            (b"Authorization: Basic abc", b" 401 "),
        ):  # fmt: skip
            reader, writer = await raw(
                rig, b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (session.path.encode(), header)
            )
            assert status in await reader.readline(), header
            writer.close()
        body = b'{"messages": [{"role": "user", "content": "w1"}]}'
        for more in ("Idempotency-Key: \udcff", f"Idempotency-Key: {'k' * 300}"):
            data = post(session, "/v1/chat/completions", len(body), body, "@\r\n")
            reader, writer = await raw(rig, data.replace(b"@", more.encode("utf-8", "surrogateescape")))
            assert b" 400 " in await reader.readline()
            writer.close()
        digits = {"x_stainless_retry_count": "9" * 5000, "x_stainless_lang": "python"}
        await session.chat("w1", max_tokens=2, headers=digits)
        error = await session.call("GET", f"/samples?max_seq_len={'9' * 5000}", status=400)
        assert error["error"]["param"] == "max_seq_len"


async def test_what_nests_too_deeply_is_refused(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        deep: object = 1
        for _ in range(300):
            deep = {"a": deep}
        message = {"role": "user", "content": "w1", "extra": deep}
        error = await session.call("POST", "/v1/chat/completions", {"messages": [message]}, status=400)
        assert error["error"]["param"] == "messages[0]"
        url, head = session.opened["base_url"], {"Authorization": f"Bearer {session.opened['token']}"}
        async with rig.http.post(url + "/chat/completions", data=b"[" * 100_000, headers=head) as answer:
            assert answer.status == 400
        many = [{"role": "user", "content": "w1"}] * 20_000
        error = await session.call("POST", "/v1/chat/completions", {"messages": many}, status=400)
        assert error["error"]["param"] == "messages"


async def test_no_token_is_ever_logged_or_recorded(rig_of, engine, caplog):
    caplog.set_level(logging.DEBUG)
    async with rig_of(engine) as rig:
        session = await rig.open()
        await session.chat("w1", max_tokens=2)
        await session.chat("w1", max_tokens=-1, status=400)
        await rig.call("GET", session.path, token=session.opened["token"] + "x", status=401)
        token = session.opened["token"]
        assert token not in caplog.text
        assert not [event for event in await rig.events() if token in repr(event)]
        assert token not in json.dumps(await session.view())


def test_headers_of_one_connection_are_not_passed_on():
    headers = CIMultiDictProxy(
        CIMultiDict(
            [
                ("Connection", "close, X-Mine"), ("X-Mine", "1"), ("Keep-Alive", "3"), ("Transfer-Encoding", "chunked"),
                ("Content-Length", "12"), ("Server", "a"), ("Server", "b"), ("Date", "now"), ("Upgrade", "h2"),
                ("X-Kept", "1"), ("X-Kept", "2"), ("Content-Type", "text/plain"),
            ]
        )
    )  # fmt: skip
    left = passed_on(
        headers, {"transfer-encoding", "content-length", "server", "date", "upgrade", "keep-alive", "connection"}
    )
    assert list(left.items()) == [("X-Kept", "1"), ("X-Kept", "2"), ("Content-Type", "text/plain")]


async def test_a_forwarded_answer_has_each_header_once(rig_of, engine):
    async with rig_of(engine, servers=2) as rig:
        session = await rig.open()
        wrong = next(u for u in rig.ctx.endpoints.session_urls if not session.opened["base_url"].startswith(u))
        head = {"Authorization": f"Bearer {session.opened['token']}"}
        body = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 3}
        async with rig.http.post(f"{wrong}{session.path}/v1/chat/completions", json=body, headers=head) as answer:
            assert answer.status == 200
            names = [name.lower() for name in answer.headers]
            assert sorted(names) == sorted(set(names))
            length = answer.headers.get("Content-Length")
            data = await answer.read()
            assert length is None or int(length) == len(data)
            assert json.loads(data)["usage"]["completion_tokens"] <= 3
        async with rig.http.get(f"{wrong}{session.path}", headers=head) as answer:
            assert len((await answer.json())["turns"]) == 1
        async with rig.http.get(f"{wrong}{session.path}", headers={**head, "X-Segue-Forwarded": "1"}) as answer:
            assert answer.status == 502


def get(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"{}")


async def test_liveness_answers_while_the_loop_is_busy(rig_of, engine):
    async with rig_of(engine) as rig:
        told = await rig.call("GET", "/healthz", token="")
        assert (told["status"], told["service"]) == ("ok", "session-0")
        found: list[tuple[float, tuple[int, dict[str, object]]]] = []

        def probe() -> None:
            time.sleep(0.3)
            begun = time.monotonic()
            found.append((begun, get(told["liveness"])))

        prober = threading.Thread(target=probe)
        prober.start()
        time.sleep(1.2)  # noqa: ASYNC251  the loop stands still
        ended = time.monotonic()
        await asyncio.to_thread(prober.join)
        asked, (status, body) = found[0]
        assert asked < ended - 0.5
        assert status == 200
        assert 0.01 < body["loop_lag_s"] < 1.2


def test_a_loop_that_stands_still_for_long_is_not_alive():
    with liveness(Heart(), "127.0.0.1", 0, stuck_s=0.2) as url:
        assert get(url)[0] == 200
        time.sleep(0.6)
        status, body = get(url)
        assert (status, body["status"]) == (503, "stuck")
        assert get(url.replace("healthz", "other"))[0] == 404
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)):
            assert get(url)[0] == 503  # a client that sends nothing holds it for a moment only


async def test_readiness_is_lost_with_the_log(rig_of, engine, monkeypatch):
    from segue.errors import LogUnavailable
    from segue.log import MemoryLog

    async with rig_of(engine) as rig:
        await rig.admit(1)
        ready = await rig.call("GET", "/readyz", token="")
        assert (ready["status"], ready["admission"]) == ("ready", "open")
        await rig.close(1)
        assert (await rig.call("GET", "/readyz", token=""))["admission"] == "closed"

        async def away(self: MemoryLog) -> int:
            raise LogUnavailable("nobody is there")

        monkeypatch.setattr(MemoryLog, "tail", away)
        lost = await rig.call("GET", "/readyz", token="", status=503)
        assert (lost["status"], "nobody is there" in lost["reason"]) == ("not ready", True)
        await rig.call("GET", "/healthz", token="")


async def test_a_broken_owner_breaks_the_forwarded_answer_off(rig_of, engine):
    """Half an answer must never look like a whole one."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        request.transport.abort()
        return response

    async with rig_of(engine, servers=2) as rig:
        session = await rig.open()
        owner = session.opened["base_url"].split("/sessions")[0]
        wrong = next(u for u in rig.ctx.endpoints.session_urls if u != owner)
        await rig.stop()
        await rig.start(rig.ctx.endpoints.session_urls.index(wrong))
        app = web.Application()
        app.router.add_get("/{all:.*}", half)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", urlsplit(owner).port).start()
        try:
            with pytest.raises(aiohttp.ClientPayloadError):
                async with rig.http.get(f"{wrong}{session.path}", headers={"Authorization": "Bearer x"}) as answer:
                    await answer.read()
        finally:
            await runner.cleanup()
        error = await rig.call("GET", f"{wrong}{session.path}", status=502)
        assert "does not answer" in error["error"]["message"]


async def _read_to_its_end(loop: asyncio.AbstractEventLoop, stalled: socket.socket) -> bytes:
    """What had been sent before the server broke off; whether that ends with a reset is the kernel's business."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await loop.sock_recv(stalled, 65536):
            parts.append(part)
    return b"".join(parts)
