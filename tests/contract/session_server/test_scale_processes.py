"""Several session servers: one owner a session whatever two of them believe, and a killed one's sessions come back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys

import aiohttp
import msgspec
import pytest
from session_server_rig import Client, free_port, make_config, text_of

from segue.boot import RunContext
from segue.config.schema import Rollout
from segue.testing.log_fixtures import LogServer
from session_server.app import serve
from session_server.fold import owner_of


async def test_of_two_servers_that_believe_they_own_a_session_one_commits(rig_of, engine, tmp_path):
    """Server 0 believes that it is alone, server 1 that there are two: both own the session."""
    async with rig_of(engine) as rig:
        await rig.stop()
        server = LogServer(tmp_path / "log")
        await server.start()
        session_id = next(name for name in (f"s{n}" for n in range(99)) if owner_of(name, 2) == 1)
        urls = tuple(f"http://127.0.0.1:{free_port()}" for _ in range(2))
        tasks = []
        try:
            for index, count in ((0, 1), (1, 2)):
                section = msgspec.structs.replace(rig.ctx.config.session_server, count=count)
                config = msgspec.structs.replace(rig.ctx.config, session_server=section)
                endpoints = msgspec.structs.replace(rig.ctx.endpoints, session_urls=urls)
                ctx = RunContext("run", tmp_path, config, endpoints)
                tasks.append(asyncio.create_task(serve(ctx, index, await server.open("run"))))
                await _ready(rig.http, urls[index])
                if index == 0:
                    opened = await rig.call("POST", urls[0] + "/sessions", {"id": session_id})
            path, token = f"/sessions/{session_id}/v1/chat/completions", opened["token"]
            statuses = await asyncio.gather(
                *[_status(rig.http, url + path, token, f"w{n}") for n, url in enumerate(urls)]
            )
            assert sorted(statuses) == [200, 503]
            loser = urls[statuses.index(503)]
            assert await _status(rig.http, loser + path, token, "w9") == 503, "who lost once has lost the session"
            log = await server.open("run")
            committed = [e.body for e in await log.read(0, limit=1000) if e.envelope.type == "turn.committed"]
            assert len(committed) == 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.close_logs()
            server.kill()


async def _status(http, url, token, content):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    async with http.post(url, json=body, headers={"Authorization": f"Bearer {token}"}) as answer:
        await answer.read()
        return answer.status


async def _ready(http, url):
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url + "/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.02)


class Keeper:
    """Starts a server process, and starts it again on the same address whenever it ends: the supervisor's part."""

    def __init__(self, run_dir, index):
        self.command = [sys.executable, "-m", "session_server", "--run-dir", str(run_dir), "--index", str(index)]
        self.starts = 0
        self.start()

    def start(self):
        self.child = subprocess.Popen(self.command)
        self.starts += 1

    async def keep(self):
        while True:
            if self.child.poll() is not None:
                self.start()
            await asyncio.sleep(0.05)

    def end(self):
        self.child.kill()
        self.child.wait()


async def converse(rig, url, turns):
    """One session through any of the servers; repeats what failed, as the vendors' clients do."""
    opened = await _insist(rig, "POST", url + "/sessions", {}, "worker")
    path = url + f"/sessions/{opened['session_id']}"
    contents = []
    for number in range(turns):
        contents.append(f"w{number}")
        messages = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]
        body = {"messages": messages, "max_tokens": 6}
        answer = await _insist(rig, "POST", path + "/v1/chat/completions", body, opened["token"])
        contents.append(text_of(answer))
    return opened, contents


async def _insist(rig, method, url, body, token):
    for attempt in range(400):
        headers = {"Authorization": f"Bearer {token}"} | ({"x-stainless-retry-count": str(attempt)} if attempt else {})
        with contextlib.suppress(aiohttp.ClientError):
            async with rig.http.request(method, url, json=body, headers=headers) as answer:
                data = await answer.json()
                if answer.status == 200:
                    return data
                assert answer.status in (502, 503, 504), (answer.status, data)
        await asyncio.sleep(0.05)
    raise AssertionError(f"{url} never answered")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_servers_killed_under_load_lose_and_double_nothing(rig_of, engine, model, tmp_path):
    """Two real processes over the real log server; each is killed with SIGKILL several times while sessions play."""
    config = make_config(model, rollout=Rollout(max_turn_tokens=32, turn_deadline_s=20))
    async with rig_of(engine, config=config, servers=2) as rig:
        await rig.stop()
        server = LogServer(tmp_path / "server")
        await server.start()
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        endpoints = msgspec.structs.replace(rig.ctx.endpoints, log_url=server.url)
        (run_dir / "config.json").write_bytes(msgspec.json.encode(rig.ctx.config))
        (run_dir / "endpoints.json").write_bytes(msgspec.json.encode(endpoints))
        keepers = [Keeper(run_dir, index) for index in range(2)]
        keeping = [asyncio.create_task(keeper.keep()) for keeper in keepers]
        try:
            for url in endpoints.session_urls:
                await _ready(rig.http, url)
            playing = asyncio.gather(*[converse(rig, endpoints.session_urls[n % 2], 12) for n in range(24)])
            chance = random.Random(0)
            for number in range(4):
                await asyncio.sleep(0.2 + chance.random() / 2)
                keepers[number % 2].child.kill()
                await asyncio.sleep(0.1)
                await _ready(rig.http, endpoints.session_urls[number % 2])
            played = await playing
            assert [keeper.starts for keeper in keepers] == [3, 3]
            log = await server.open("run")
            events = [e.body for e in await log.read(0, limit=100_000)]
            await _check(rig, endpoints.session_urls, played, events)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            for keeper in keepers:
                keeper.end()
            await server.close_logs()
            server.kill()


async def _check(rig, urls, played, events):
    of = {name: [b for b in events if b.SPEC.name == name] for name in {b.SPEC.name for b in events}}
    for opened, contents in played:
        client = Client(rig, opened)
        view = await rig.call("GET", urls[0] + client.path, token=opened["token"])
        told = [message["content"] for turn in view["turns"] for message in turn["messages"]]
        assert told == contents, "every answer that a client got is committed, once and in order"
        finished = await rig.call("POST", urls[1] + client.path + "/finish", {"reward": 1}, opened["token"])
        assert finished["turns"] == 12
    assert len(of["turn.committed"]) == 24 * 12
    opened_requests = sorted(b.request_id for b in of["turn.started"])
    ended = [b.request_id for name in ("committed", "discarded", "failed") for b in of.get(f"turn.{name}", [])]
    assert sorted(ended) == opened_requests, "each request is closed once"
    assert len(of.get("turn.discarded", [])) > 0, "the kills met open turns"


def test_sessions_spread_evenly_and_few_move_when_a_server_is_added():
    ids = [f"sess-{n}" for n in range(4000)]
    before, after = [owner_of(i, 4) for i in ids], [owner_of(i, 5) for i in ids]
    assert all(850 < before.count(index) < 1150 for index in range(4))
    moved = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert all(other == 4 for _, other in moved)
    assert 650 < len(moved) < 950
