"""The session server killed at every suspension of a request: nothing is lost, nothing doubled, the retry gets it.

The server runs as a simulated process. From the moment that a client sends a request, the k-th step of any of its tasks
and callbacks is its last: no `finally` runs, its sockets are reset, its memory is gone; what stands in the log stays.
It is started again from the same log, the client repeats its request, and k goes up until a request survives whole, so
every await point of the request's whole task tree has been the last.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from session_server_rig import LAYERS, TOP_K, VOCABULARY, free_port, make_config, with_r3

from segue.blobs import BlobStore
from segue.boot import Endpoints, RunContext
from segue.events.turn import TurnCommitted
from segue.log import MemoryLog
from segue.testing.simulation import _PROCESS, Process, SimulatedLoop
from segue.wire.sample import sample_from_frame
from session_server import app as server_app
from session_server.app import serve

END = VOCABULARY["<|im_end|>"]
FIRST_WORD = VOCABULARY["w0"]
WORD_COUNT = 56
MAX_POINTS = 2000
LEAST_POINTS = {"marked turn": 12, "keyed turn": 12, "unmarked turn": 12, "reward": 5, "finish": 7}


class SteppedLoop(SimulatedLoop):
    """Counts the steps of one process and kills it after the last that it may take."""

    def __init__(self) -> None:
        super().__init__()
        self.victim: Process | None = None
        self.left = 0

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        callback(*args)
        victim = self.victim
        if victim is not None and _PROCESS.get() is victim:
            self.left -= 1
            if self.left == 0:
                self.victim = None
                victim.kill()


@dataclass
class World:
    """An engine whose every answer is another, a log, and one session server that is started again when it dies."""

    loop: SteppedLoop
    ctx: RunContext
    log: MemoryLog
    process: Process
    http: aiohttp.ClientSession
    generated: int = 0
    starts: int = 0
    sessions: list[str] = field(default_factory=list)
    marks_retries: bool = True

    async def generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        number, self.generated = self.generated, self.generated + 1
        words = [FIRST_WORD + number % WORD_COUNT, FIRST_WORD + number // WORD_COUNT % WORD_COUNT]
        ids = [*words, FIRST_WORD + number // WORD_COUNT**2, END]
        await asyncio.sleep(0.01)
        rows = len(body["input_ids"]) + len(ids) - 1 - body.get("routed_experts_start_len", 0)
        routes = np.full((rows, LAYERS, TOP_K), number % 8, "<i4")
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop", "matched": END}, "completion_tokens": len(ids),
            "prompt_tokens": len(body["input_ids"]), "weight_version": "0",
            "output_token_logprobs": [[-float(number), i, None] for i in ids],
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    async def other(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"engine_id": "e", "incarnation": "1", "url": self.ctx.endpoints.router_url, "version": 0}
        )

    def start(self) -> None:
        self.starts += 1
        self.process = self.loop.process(f"session-0/{self.starts}")
        self.process.start(serve(self.ctx, 0, self.log.view()))

    async def call(self, method: str, path: str, body: object = None, token: str = "admin", **headers: str) -> Any:
        """Repeated until it is answered, as the clients of vendors do it; a dead server is started again."""
        for attempt in itertools.count():
            if self.process.dead:
                self.start()
            head = {"Authorization": f"Bearer {token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
            if attempt and self.marks_retries:
                head["x-stainless-retry-count"] = str(attempt)
            with contextlib.suppress(aiohttp.ClientError):
                url = self.ctx.endpoints.session_urls[0] + path
                async with self.http.request(method, url, json=body, headers=head) as answer:
                    data = await answer.read()
                    if answer.status < 500:
                        assert answer.status == 200, (answer.status, data)
                        return data if answer.content_type != "application/json" else json.loads(data)
            assert attempt < 200, "the server does not come back"
            await asyncio.sleep(0.05)
        raise AssertionError

    async def events(self) -> list[Any]:
        return [event.body for event in await self.log.read(0, limit=1_000_000)]


async def with_world(
    loop: SteppedLoop, model: Path, folder: Path, main: Callable[[World], Coroutine[Any, Any, None]]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    endpoints = Endpoints(
        log_url="", router_url=url, ray_address="", ray_temp_dir="",
        session_urls=(f"http://127.0.0.1:{free_port()}",), admin_token="admin", worker_token="worker",
    )  # fmt: skip
    ctx = RunContext("run", folder, with_r3(make_config(model)), endpoints)
    async with aiohttp.ClientSession() as http:
        world = World(loop, ctx, MemoryLog("run", mono_s=loop.time), loop.process("none"), http)
        application = web.Application()
        application.add_routes([web.post("/generate", world.generate), web.post("/{rest}", world.other)])
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(url.rpartition(":")[2])).start()
        world.start()
        try:
            await main(world)
        finally:
            world.process.kill()
            await runner.cleanup()


async def play(world: World, arm: str, k: int) -> bool:
    """One conversation of three turns, a reward and a finish, with the server's death in the request named `arm`.
    Whether it did not die, because the request took fewer steps."""
    opened = await world.call("POST", "/sessions", {"temperature": 1.0})
    path, token = f"/sessions/{opened['session_id']}", opened["token"]
    world.sessions.append(opened["session_id"])

    async def request(name: str, *call: Any, **headers: str) -> Any:
        if name == arm:
            world.loop.left, world.loop.victim = k, world.process
        answer = await world.call(*call, token=token, **headers)
        if name == arm:
            world.loop.victim = None
        return answer

    world.marks_retries = arm == "marked turn"
    starts, messages, said = world.starts, list[dict[str, str]](), list[str]()
    for turn in range(3):
        messages.append({"role": "user", "content": f"w{turn} w{turn}"})
        headers = {"Idempotency_Key": f"key-{turn}"} if arm == "keyed turn" else {}
        name = arm if turn == 1 and arm.endswith("turn") else ""
        answer = await request(name, "POST", path + "/v1/chat/completions", {"messages": messages}, **headers)
        messages.append(answer["choices"][0]["message"])
        said.append(messages[-1]["content"])
    await request("reward", "POST", path + "/reward", {"value": 0.5, "key": "k"})
    survived = arm == "finish" or world.starts == starts
    view = await world.call("GET", path)
    assert [turn["messages"][-1]["content"] for turn in view["turns"]] == said, "nothing lost, doubled or swapped"
    parents = [None, *(turn["turn_id"] for turn in view["turns"])]
    assert [turn["parent_id"] for turn in view["turns"]] == parents[:-1]
    assert [reward["value"] for reward in view["rewards"]] == [0.5]
    finished = await request("finish", "POST", path + "/finish", {"status": "ok"})
    assert finished["turns"] == 3, finished
    frame = BlobStore(world.ctx.blob_dir).get(finished["frame_digest"])
    tokens = [i for turn in view["turns"] for i in (*turn["prompt_ids"], *turn["output_ids"])]
    assert sample_from_frame(frame).tokens.tolist() == tokens
    return survived and world.starts == starts


async def check_log(world: World) -> None:
    """Of the whole log: one commit a turn, one outcome and one ending a session, every request closed once."""
    found = await world.events()
    by_type: dict[str, list[Any]] = {}
    for body in found:
        by_type.setdefault(type(body).__name__, []).append(body)
    committed: list[TurnCommitted] = by_type["TurnCommitted"]
    assert sorted(body.session_id for body in committed) == sorted(3 * world.sessions)
    for name in ("SessionFinished", "SampleReady"):
        assert [body.session_id for body in by_type[name]] == world.sessions, name
    assert len(by_type["RewardRecorded"]) == len(world.sessions)
    opened = [body.request_id for body in by_type["TurnStarted"]]
    closed = [
        body.request_id for name in ("TurnCommitted", "TurnDiscarded", "TurnFailed") for body in by_type.get(name, [])
    ]
    assert sorted(opened) == sorted(closed)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("arm", ["marked turn", "keyed turn", "unmarked turn", "reward", "finish"])
def test_a_kill_at_any_await_point_loses_and_doubles_nothing(
    arm: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_app, "liveness", lambda *_: contextlib.nullcontext(""))  # a thread, not of this world
    points = 0

    async def main(world: World) -> None:
        nonlocal points
        for k in range(1, MAX_POINTS):
            if await play(world, arm, k):
                break
            points = k
        else:
            pytest.fail("the request never ends")
        await check_log(world)

    loop = SteppedLoop()
    asyncio.set_event_loop(loop)
    logging.disable(logging.CRITICAL)  # what is killed a hundred times would complain a hundred times
    try:
        with mock.patch.object(time, "time", loop.wall_s), mock.patch.object(time, "monotonic", loop.time):
            loop.run_until_complete(with_world(loop, model, tmp_path, main))
    finally:
        logging.disable(logging.NOTSET)
        asyncio.set_event_loop(None)
        loop.close()
    assert points >= LEAST_POINTS[arm], "a request has more suspensions than that"
