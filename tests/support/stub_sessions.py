"""A session server's routes as an environment sees them, without a policy behind: for tests of environment programs.

`answer(messages)` plays the policy: it returns the text and the finish_reason. What environments do is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from segue.ports import free_port

Answer = Callable[[list[dict[str, str]]], tuple[str, str]]
WORKER_TOKEN = "worker-token"


@dataclass
class StubSessions:
    """`leases`: (purpose, group) to hand out. `fail`: statuses to answer to coming turns instead of an answer."""

    answer: Answer
    leases: Iterator[tuple[str, int]]
    fail: list[int] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    transcripts: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    sessions: dict[str, tuple[str, int]] = field(default_factory=dict)
    lease_bodies: list[dict[str, Any]] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubSessions]:
        app = web.Application()
        app.router.add_post("/rollouts/lease", self._lease)
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{id}/finish", self._finish)
        app.router.add_delete("/sessions/{id}", self._delete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def until(self, done: Callable[[], bool], within_s: float = 50.0) -> None:
        async with asyncio.timeout(within_s):
            while not done():
                await self.changed.wait()
                self.changed.clear()

    async def _lease(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {WORKER_TOKEN}":
            return web.Response(status=401)
        body = await request.json()
        self.lease_bodies.append(body)
        found = next(self.leases, None)
        if found is None:
            await asyncio.sleep(min(float(body.get("wait_s", 0)), 0.2))
            return web.Response(status=204)
        session_id = f"s{next(self._numbers)}"
        self.sessions[session_id] = found
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        return web.json_response(
            {
                "session_id": session_id, "token": f"token-{session_id}", "purpose": found[0], "group": found[1],
                "base_url": f"{self.url}/sessions/{session_id}/v1", "member": 0, "index": found[1], "seed": found[1],
                "rollout_id": f"{found[0]}-{found[1]}-0", "task": {}, "deadline_wall_s": 0.0,
            }
        )  # fmt: skip

    def _session(self, request: web.Request) -> str:
        session_id = request.match_info["id"]
        if request.headers.get("Authorization") != f"Bearer token-{session_id}":
            raise web.HTTPUnauthorized
        return session_id

    async def _chat(self, request: web.Request) -> web.Response:
        session_id, body = self._session(request), await request.json()
        self.turns[session_id] += 1
        if self.fail:
            status = self.fail.pop(0)
            error = {"type": "test", "message": f"told to answer {status}", "param": None, "retryable": status >= 500}
            return web.json_response({"error": error}, status=status)
        text, reason = self.answer(body["messages"])
        message = {"role": "assistant", "content": text}
        self.transcripts[session_id] = [*body["messages"], message]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [choice],
                "usage": usage,
            }
        )

    async def _finish(self, request: web.Request) -> web.Response:
        session_id = self._session(request)
        self.finished[session_id] = await request.json()
        self._ended()
        return web.json_response({"session_id": session_id})

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(self._session(request))
        self._ended()
        return web.Response(status=204)

    def _ended(self) -> None:
        self.open_now -= 1
        self.changed.set()
