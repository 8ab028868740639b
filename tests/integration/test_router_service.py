"""The router as it runs: log and commands on one side, HTTP on the other, engines that answer or do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from router.service import serve
from router.state import SERVICE
from segue.boot import Endpoints, RunContext
from segue.config.schema import Config, Router
from segue.errors import ProcessError
from segue.events import engine, run, turn, weights, work
from segue.events.base import Body
from segue.log.memory import MemoryLog
from segue.log.writer import Writer
from segue.ports import free_port

WORKER = {"Authorization": "Bearer worker-token"}


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


@dataclass
class StubEngine:
    """An HTTP server in an engine's place: says who it is, and answers health as told."""

    name: str
    url: str = ""
    health: int = 200
    bodies: list[bytes] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubEngine]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.json_response({"from": self.name}, status=422 if b"bad" in self.bodies[-1] else 200)

    def started(self, version: int = 0, incarnation: str = "a") -> engine.EngineStarted:
        return engine.EngineStarted(
            engine_id=self.name, incarnation=incarnation, url=self.url, kind="fake", version=version, checksum="",
            start_s=0.1,
        )  # fmt: skip


@dataclass
class World:
    """A run's log, its router, and a client of the router."""

    log: MemoryLog
    controller: Writer
    ctx: RunContext
    http: aiohttp.ClientSession

    async def say(self, *bodies: Body, to: tuple[str, ...] = ()) -> None:
        for body in bodies:
            await self.controller.append(body, targets=to)

    async def post(
        self, path: str, body: object, headers: dict[str, str] = WORKER
    ) -> tuple[int, dict[str, object], str]:
        async with self.http.post(self.ctx.endpoints.router_url + path, json=body, headers=headers) as response:
            data = await response.json() if response.status != 204 else {}
            return response.status, data, response.headers.get("Retry-After", "")

    async def assign(self, session: str, exclude: tuple[str, ...] = ()) -> str | None:
        status, body, _ = await self.post("/assign", {"session_id": session, "exclude": exclude})
        return str(body["engine_id"]) if status == 200 else None

    async def facts[F: Body](self, kind: type[F]) -> list[F]:
        return [r.body for r in await self.log.read(0, limit=10_000) if isinstance(r.body, kind)]

    async def open(self, admission: int = 1) -> None:
        command = work.OpenAdmission(
            admission=admission, purpose="train", step=1, first_group=0, end_group=8, group_size=8
        )
        await self.say(command, to=(SERVICE,))
        await until(lambda: self._said(work.AdmissionOpened, admission), "AdmissionOpened")

    async def close(self, pause: int = 1) -> None:
        await self.say(work.CloseAdmission(pause=pause), to=(SERVICE,))
        await until(lambda: self._said(work.AdmissionClosed, pause), "AdmissionClosed")

    async def _said(self, kind: type[work.AdmissionOpened] | type[work.AdmissionClosed], number: int) -> bool:
        said = await self.facts(kind)
        return number in [one.admission if isinstance(one, work.AdmissionOpened) else one.pause for one in said]

    @asynccontextmanager
    async def router(self) -> AsyncIterator[None]:
        """A router process of this run: its own view of the log, cancelled at the end as SIGTERM would."""
        ready = len(await self.facts(run.ServiceReady))

        async def is_ready() -> bool:
            return task.done() or len(await self.facts(run.ServiceReady)) > ready

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(serve(self.ctx, self.log.view()))
            await until(is_ready, "ServiceReady")
            yield
            task.cancel()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    log = MemoryLog("run-1")
    endpoints = Endpoints(
        log_url="", router_url=f"http://127.0.0.1:{free_port()}", session_urls=(), ray_address="", ray_temp_dir="",
        admin_token="admin-token", worker_token="worker-token",
    )  # fmt: skip
    config = Config(router=Router(health_interval_s=0.05))
    async with await Writer.open(log, "controller") as writer, aiohttp.ClientSession() as http:
        yield World(log, writer, RunContext("run-1", tmp_path, config, endpoints), http)


async def test_it_places_sessions_keeps_them_and_moves_them_when_their_engine_is_lost(world: World) -> None:
    async with StubEngine("e0").running() as e0, StubEngine("e1").running() as e1:
        await world.say(e0.started(), e1.started())
        async with world.router():
            await world.open()
            places = [await world.assign(f"s{i}") for i in range(4)]
            assert sorted(p for p in places if p) == ["e0", "e0", "e1", "e1"]
            assert [await world.assign(f"s{i}") for i in range(4)] == places
            await world.say(engine.EngineLost(engine_id="e0", incarnation="a", reason="killed"))
            await until(lambda: _equals(world.assign("s0"), "e1"), "s0 moves to e1")


async def test_a_version_is_admitted_by_its_sync_and_stale_engines_get_nothing(world: World) -> None:
    async with StubEngine("e0").running() as e0, StubEngine("e1").running() as e1:
        await world.say(e0.started(), e1.started())
        async with world.router():
            await world.open()
            await world.say(
                weights.WeightsSynced(sync=1, version=1, digest="d", engines=("e1",), bytes=1, took_s=0.1, proved=True)
            )
            await until(lambda: _equals(world.assign("a"), "e1"), "only e1 holds version 1")
            status, body, _ = await world.post("/assign", {"session_id": "b", "exclude": []})
            assert (status, body["version"], body["url"], body["incarnation"]) == (200, 1, e1.url, "a")
            status, body, retry_after = await world.post("/assign", {"session_id": "b", "exclude": ["e1"]})
            assert (status, retry_after) == (503, "1")
            assert body == {
                "error": {
                    "type": "no_engine", "message": "no healthy engine holds weight version 1", "param": None,
                    "retryable": True,
                }
            }  # fmt: skip


async def test_an_engine_that_fails_its_probes_gets_nothing_but_a_paused_one_may_answer_503(world: World) -> None:
    async with StubEngine("e0").running() as e0, StubEngine("e1").running() as e1:
        await world.say(e0.started(), e1.started())
        async with world.router():
            await world.open()
            first = await world.assign("s")
            sick, other = (e0, "e1") if first == "e0" else (e1, "e0")
            sick.health = 503
            await until(lambda: _equals(world.assign("s"), other), "s leaves the sick engine")
            paused = engine.EnginePaused(pause=1, engine_id=sick.name, mode="abort", realised_as="retract", took_s=0.1)
            await world.say(paused)
            await until(lambda: _equals(world.assign("s", (other,)), sick.name), "a paused engine is well")


async def test_closed_admission_stops_new_sessions_and_plain_clients_and_is_said_in_the_log(world: World) -> None:
    async with StubEngine("e0").running() as e0:
        await world.say(e0.started())
        async with world.router():
            await world.open()
            assert await world.assign("known") == "e0"
            status, body, _ = await world.post("/generate", {"text": "x"})
            assert (status, body) == (200, {"from": "e0"})
            await world.close(pause=1)
            assert await world.assign("known") == "e0"
            for path, body in (("/assign", {"session_id": "new"}), ("/generate", {}), ("/v1/chat/completions", {})):
                status, answer, retry_after = await world.post(path, body)
                error = answer["error"]
                assert isinstance(error, dict)
                assert (status, error["type"], error["retryable"], retry_after) == (503, "admission_closed", True, "1")
            await world.open(admission=2)
            assert await world.assign("new") == "e0"
            assert [f.pause for f in await world.facts(work.AdmissionClosed)] == [1]
            assert e0.bodies == [b'{"text": "x"}']


async def test_an_answer_of_an_engine_passes_through_whatever_it_is(world: World) -> None:
    async with StubEngine("e0").running() as e0:
        await world.say(e0.started())
        async with world.router():
            await world.open()
            assert (await world.post("/v1/chat/completions", {"bad": 1}))[:2] == (422, {"from": "e0"})
            e0.url = "http://127.0.0.1:1"
            await world.say(e0.started(incarnation="b"))
            await until(lambda: _equals(_status(world, "/generate"), 502), "nobody listens there")


async def test_a_drain_moves_sessions_and_ends_when_the_last_has_left(world: World) -> None:
    async with StubEngine("e0").running() as e0, StubEngine("e1").running() as e1:
        await world.say(e0.started(), e1.started())
        async with world.router():
            await world.open()
            first = await world.assign("s")
            assert first is not None
            await world.say(engine.DrainEngine(engine_id=first, drain=1), to=(SERVICE,))
            await until(lambda: _differs(world.assign("s"), first), "s leaves the draining engine")
            await world.say(run.AlarmRaised(kind="test", subject="", detail="one more event"))

            async def drained() -> bool:
                return [(f.engine_id, f.drain) for f in await world.facts(engine.EngineDrained)] == [(first, 1)]

            await until(drained, "EngineDrained, once")


async def test_after_a_restart_sessions_are_where_they_were_and_closed_is_closed(world: World) -> None:
    async with StubEngine("e0").running() as e0, StubEngine("e1").running() as e1:
        await world.say(e0.started(), e1.started())
        async with world.router():
            await world.open()
            place = await world.assign("s")
            assert place is not None
            await world.say(
                turn.TurnStarted(session_id="s", turn_id="t", request_id="r", engine_id=place, prompt_tokens=1)
            )
            await world.close()
        async with world.router():
            assert await world.assign("s") == place
            assert await world.assign("new") is None
    assert [ready.service for ready in await world.facts(run.ServiceReady)] == ["router", "router"]


async def test_a_released_session_no_longer_counts(world: World) -> None:
    async with StubEngine("e0").running() as e0:
        await world.say(e0.started())
        async with world.router():
            await world.open()
            await world.assign("s")
            assert [row["sessions"] for row in await _engines(world)] == [1]
            assert (await world.post("/release", {"session_id": "s"}))[0] == 204
            assert [row["sessions"] for row in await _engines(world)] == [0]


async def test_only_health_needs_no_token(world: World) -> None:
    async with StubEngine("e0").running() as e0:
        await world.say(e0.started())
        async with world.router():
            url = world.ctx.endpoints.router_url
            for path, wanted in (("/healthz", 200), ("/readyz", 200), ("/engines", 401), ("/metrics", 401)):
                async with world.http.get(url + path) as response:
                    assert response.status == wanted, path
            for headers in ({}, {"Authorization": "Bearer worker-toke"}, {"Authorization": "Basic worker-token"}):
                status, body, _ = await world.post("/assign", {"session_id": "s"}, headers)
                assert status == 401
                assert body["error"]["type"] == "authentication_error"  # type: ignore[index]
            async with world.http.get(url + "/metrics", headers={"Authorization": "Bearer admin-token"}) as response:
                assert "segue_router_engines_usable 1.0" in await response.text()


@pytest.mark.parametrize("body", [{}, {"session_id": 3}, {"session_id": "s", "more": 1}, [], {"session_id": None}])
async def test_a_malformed_body_is_the_clients_error(world: World, body: object) -> None:
    async with world.router():
        status, answer, _ = await world.post("/assign", body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"  # type: ignore[index]


async def test_an_unknown_route_is_answered_in_the_same_shape(world: World) -> None:
    async with world.router():
        status, answer, _ = await world.post("/nowhere", {})
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error")  # type: ignore[index]


async def test_a_port_in_use_is_one_clear_error(world: World) -> None:
    async with world.router():
        with pytest.raises(ProcessError, match=r"cannot listen on 127\.0\.0\.1:\d+"):
            await serve(world.ctx, world.log.view())


async def test_a_command_that_was_delivered_too_often_is_set_aside(world: World) -> None:
    await world.say(work.CloseAdmission(pause=4), to=(SERVICE,))
    for _ in range(6):
        await world.log.view().receive(SERVICE, SERVICE)
    async with world.router():
        await until(lambda: _some(world.facts(run.CommandDeadLettered)), "CommandDeadLettered")
    assert (await world.facts(run.CommandDeadLettered))[0].deliveries == 7
    assert await world.facts(work.AdmissionClosed) == []
    assert [position for position, _ in await world.log.buried(SERVICE)] == [1]


async def test_a_command_left_unacknowledged_by_a_crash_is_carried_out_again_as_one_fact(world: World) -> None:
    await world.say(work.CloseAdmission(pause=4), to=(SERVICE,))
    await world.log.view().receive(SERVICE, SERVICE)
    async with world.router():
        await until(lambda: _some(world.facts(work.AdmissionClosed)), "AdmissionClosed")
    async with world.router():
        pass
    assert [f.pause for f in await world.facts(work.AdmissionClosed)] == [4]


async def _equals(value: Awaitable[object], wanted: object) -> bool:
    return await value == wanted


async def _differs(value: Awaitable[object], unwanted: object) -> bool:
    return await value not in (unwanted, None)


async def _some(value: Awaitable[list[object]] | Awaitable[list[Body]]) -> bool:
    return bool(await value)


async def _status(world: World, path: str) -> int:
    return (await world.post(path, {}))[0]


async def _engines(world: World) -> list[dict[str, object]]:
    async with world.http.get(world.ctx.endpoints.router_url + "/engines", headers=WORKER) as response:
        rows: list[dict[str, object]] = await response.json()
        return rows
