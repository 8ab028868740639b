"""A whole run in simulated time: controller, session server, router, actors, engine, trainer and environment in one
thread, each a process that can be killed at any event and is started again by its keeper.

Everything is the product's own code but the engine and the trainer, which are its fakes, and the environment, which is
a client of a few lines. The log is in memory and plays the log server, which outlives every other process.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from session_server_rig import free_port, write_model

from actors.engines import LaunchSpec
from actors.engines.fake.model import model_of
from actors.engines.fake.server import FakeEngine, FakeOptions
from actors.rollout import RolloutActor
from actors.trainer import TrainerActor
from controller.loop import Loop
from router.service import serve as serve_router
from segue.boot import Endpoints, RunContext
from segue.config.schema import R3, Checkpoint, Config, Engine, Evaluation, Model, Offload, Rollout, Run, Trainer
from segue.errors import EngineError
from segue.events import Recorded, run
from segue.log import EventLog, MemoryLog, Writer
from segue.testing.simulation import Process, SimulatedLoop, die_if_killed
from session_server.app import serve as serve_sessions

TURNS = 2
BACKOFF_S = 0.5
STOPPED = f'"{run.RunStopped.SPEC.name}"'.encode()
SIZES_GIB = {"weights": 4.0, "mirror": 4.0, "kv_cache": 8.0, "params": 4.0, "optimizer": 24.0, "backup": 24.0}
SPECIES = ("controller", "session-0", "router", "engine-0", "engine-0/process", "trainer", "env-0")
"""All that can be killed."""


def simulated_config(model: Path, **sections: Any) -> Config:
    config = Config(
        run=Run(name="sim", steps=2),
        model=Model(path=str(model)),
        engine=Engine(kind="fake", fake_token_s=0.02, max_running_requests=64),
        trainer=Trainer(kind="fake"),
        rollout=Rollout(groups_per_step=2, group_size=2, max_turn_tokens=6, max_session_tokens=512, lease_s=120.0),
        r3=R3(enabled=True),
        checkpoint=Checkpoint(every=2),
        evaluation=Evaluation(groups=1, group_size=1),
        offload=Offload(level=("weights", "kv_cache"), memory_peak="device", sizes_gib=SIZES_GIB),
    )
    return msgspec.structs.replace(config, **sections)


class _InProcessEngine:
    """Stands where EngineProcess stands: the fake engine as a simulated process of its own."""

    def __init__(self, world: SimulatedRun, name: str, spec: LaunchSpec) -> None:
        self._world, self._name, self._spec = world, name, spec
        self._process: Process | None = None

    async def start(self, *, deadline_s: float) -> None:
        self._process = self._world.loop.process(self._name)
        self._world.processes[self._name] = self._process
        serving: asyncio.Future[None] = self._world.loop.create_future()
        self._process.start(self._serve(serving))
        try:
            await asyncio.wait_for(serving, deadline_s)
        except TimeoutError as error:
            raise EngineError(f"{self._name} did not come up") from error

    async def _serve(self, serving: asyncio.Future[None]) -> None:
        config, folder = self._world.ctx.config, Path(self._world.ctx.config.model.path)
        port = int(self._spec.url.rpartition(":")[2])
        options = FakeOptions(
            model_path=folder, model=model_of(folder, eos_p=0.1), port=port, token_s=config.engine.fake_token_s,
            context_length=config.engine.context_length, max_running_requests=config.engine.max_running_requests,
        )  # fmt: skip
        async with FakeEngine(options):
            serving.set_result(None)
            await asyncio.Event().wait()

    async def wait(self) -> int:
        assert self._process is not None
        await asyncio.shield(self._process.ended)
        return -9

    async def stop(self, *, grace_s: float = 0.0) -> None:
        if self._process is not None:
            self._process.kill()


class _RolloutActor(RolloutActor):
    def __init__(self, world: SimulatedRun, engine_id: str) -> None:
        super().__init__(world.ctx, engine_id)
        self._world = world

    def _make_process(self, spec: LaunchSpec) -> Any:
        return _InProcessEngine(self._world, f"{self.engine_id}/process", spec)


@dataclass
class SimulatedRun:
    """`await finished()` after `start()`. Call `kill(name)` whenever you like."""

    loop: SimulatedLoop
    ctx: RunContext
    log: MemoryLog
    processes: dict[str, Process] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    """RunStopped stands in the log."""
    seen: int = 0
    """Events seen so far by `on_event`."""
    habits: Habits = field(default_factory=lambda: Habits())
    on_event: Callable[[int], None] | None = None
    """Called once for every event, with its position, before anything else happens."""

    @classmethod
    def create(cls, loop: SimulatedLoop, folder: Path, config: Config) -> SimulatedRun:
        folder.mkdir(parents=True, exist_ok=True)
        endpoints = Endpoints(
            log_url="", router_url=f"http://127.0.0.1:{free_port()}", ray_address="", ray_temp_dir="",
            session_urls=(f"http://127.0.0.1:{free_port()}",), admin_token="admin", worker_token="worker",
            start_id="start",
        )  # fmt: skip
        made = cls(loop, RunContext("sim", folder, config, endpoints), MemoryLog("sim", mono_s=loop.time))
        log, inner = made.log, made.log.append

        async def append(batch: Any) -> Any:
            answers = await inner(batch)
            made.ended = made.ended or any(STOPPED in item.data for item in batch)
            made._tell(await log.tail())
            await die_if_killed()
            return answers

        log.append = append  # type: ignore[method-assign]
        return made

    def _tell(self, tail: int) -> None:
        while self.seen < tail:
            self.seen += 1
            if self.on_event is not None:
                self.on_event(self.seen)

    def start(self) -> None:
        for name, main in self._parts().items():
            self.loop.create_task(self._keep(name, main), name=f"keep-{name}")

    def _parts(self) -> dict[str, Callable[[EventLog], Coroutine[Any, Any, None]]]:
        ctx = self.ctx
        return {
            "controller": lambda log: _controller(ctx, log),
            "session-0": lambda log: serve_sessions(ctx, 0, log),
            "router": lambda log: serve_router(ctx, log),
            "engine-0": lambda log: _RolloutActor(self, "engine-0").run(log),
            "trainer": lambda log: TrainerActor(ctx).run(log),
            "env-0": lambda log: Worker(ctx, self.starts["env-0"], self.habits).run(),
        }

    async def _keep(self, name: str, main: Callable[[EventLog], Coroutine[Any, Any, None]]) -> None:
        """The supervisor's part: what ends is started again after a moment."""
        while True:
            self.starts[name] = self.starts.get(name, 0) + 1
            process = self.processes[name] = self.loop.process(name)
            process.start(main(self.log.view()))
            await process.ended
            process.kill()
            if name == "controller" and self.ended:
                return
            await asyncio.sleep(BACKOFF_S)

    def kill(self, name: str) -> None:
        """SIGKILL; the engine dies with its actor."""
        if name in self.processes:
            self.processes[name].kill()
        if name == "engine-0" and "engine-0/process" in self.processes:
            self.processes["engine-0/process"].kill()

    async def events(self) -> list[Recorded]:
        return await self.log.read(0, limit=1_000_000)

    async def finished(self, deadline_s: float = 3600.0) -> list[Recorded]:
        """All events, once RunStopped stands in the log; simulated seconds."""
        async with asyncio.timeout(deadline_s):
            while not self.ended:
                await asyncio.sleep(0.25)
        return await self.events()


async def _controller(ctx: RunContext, log: EventLog) -> None:
    async with await Writer.open(log, "controller") as writer:
        await Loop(ctx, log, writer).run()


@dataclass(frozen=True, slots=True)
class Habits:
    """How an environment behaves. think_s: mean of the time between turns (exponential). forget_p: chance that a judge
    takes `forget_s`, longer than any lease. lost_p: chance that a request's answer is not waited for, but asked again
    a moment later."""

    turns: int = TURNS
    concurrency: int = 4
    think_s: float = 0.0
    forget_p: float = 0.0
    forget_s: float = 0.0
    lost_p: float = 0.0
    seed: int = 0


class Worker:
    """An environment worker: plays rollouts turn by turn, and repeats whatever got no answer."""

    def __init__(self, ctx: RunContext, incarnation: int, habits: Habits) -> None:
        self.ctx, self.name, self.habits = ctx, f"env-0/{incarnation}", habits
        self.url = ctx.endpoints.session_urls[0]
        self.random = random.Random(f"{habits.seed}/{incarnation}")

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.ctx.config.rollout.turn_deadline_s + 60)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
            for _ in range(self.habits.concurrency):
                group.create_task(self._play_for_ever(http))

    async def _play_for_ever(self, http: aiohttp.ClientSession) -> None:
        while True:
            body = {"wait_s": 20.0, "worker": self.name}
            status, lease = await self._post(http, "/rollouts/lease", body, "worker")
            if status == 200:
                await self._play(http, lease)

    async def _play(self, http: aiohttp.ClientSession, lease: dict[str, Any]) -> None:
        path, token = f"/sessions/{lease['session_id']}", lease["token"]
        messages: list[dict[str, Any]] = []
        for turn in range(self.habits.turns):
            await self._think()
            messages.append({"role": "user", "content": f"w{(lease['seed'] + 7 * turn) % 50} w{lease['member']}"})
            status, answer = await self._post(
                http, path + "/v1/chat/completions", {"messages": messages}, token, key=f"{lease['session_id']}-{turn}"
            )
            if status != 200:
                return  # the session is over: somebody else has the rollout
            messages.append(answer["choices"][0]["message"])
        reward = sum(map(ord, json.dumps([m["content"] for m in messages]))) % 97 / 97
        await self._post(http, path + "/finish", {"reward": reward, "status": "ok"}, token)

    async def _think(self) -> None:
        if self.random.random() < self.habits.forget_p:
            await asyncio.sleep(self.habits.forget_s)
        elif self.habits.think_s:
            await asyncio.sleep(self.random.expovariate(1 / self.habits.think_s))

    async def _post(
        self, http: aiohttp.ClientSession, path: str, body: object, token: str, key: str = ""
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}", **({"Idempotency-Key": key} if key else {})}
        while True:
            patience_s = self.random.uniform(0.0, 90.0) if self.random.random() < self.habits.lost_p else None
            try:
                async with (
                    asyncio.timeout(patience_s),
                    http.post(self.url + path, json=body, headers=headers) as answer,
                ):
                    data = await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.3)
                continue
            if answer.status in (429, 502, 503, 504, 507):
                await asyncio.sleep(0.3)
                continue
            return answer.status, json.loads(data) if data else {}


def tiny_model(folder: Path) -> Path:
    return write_model(folder)
