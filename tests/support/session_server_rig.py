"""A session server over a fake engine process, a scripted router and a log in memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from segue.boot import Endpoints, RunContext
from segue.config.schema import R3, Config, Engine, Model, Rollout
from segue.events.base import Body
from segue.events.engine import EngineResumed
from segue.events.work import CloseAdmission, OpenAdmission
from segue.log import MemoryLog, Writer
from session_server.app import serve

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("system", "user", "assistant", "tool", "\n", *(f"w{index}" for index in range(56)))
VOCABULARY = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
LAYERS, TOP_K, EXPERTS = 3, 2, 8


def write_model(folder: Path) -> Path:
    """A model folder without weights: a vocabulary of 64 words and ChatML."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(dict(VOCABULARY), unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "vocab_size": len(VOCABULARY), "eos_token_id": 2, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


PROCESSES: dict[str, subprocess.Popen[str]] = {}
"""Engine processes by URL."""


@contextlib.contextmanager
def fake_engine(model: Path, *options: str) -> Iterator[str]:
    """A fake engine as a process of its own; gives its URL."""
    command = [sys.executable, "-m", "actors.engines.fake", "--model-path", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" at ")[1].strip()
            PROCESSES[url] = process
            yield url
        finally:
            process.kill()


@dataclass
class Router:
    """Assigns every session to the engines in turn; records what it was asked."""

    engines: dict[str, str]
    asked: list[dict[str, Any]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    url: str = ""

    async def assign(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        allowed = [e for e in self.engines if e not in body["exclude"]]
        if not allowed:
            return web.json_response({"error": {"message": "no engine"}}, status=503)
        answer = {"engine_id": allowed[0], "incarnation": "1", "url": self.engines[allowed[0]], "version": 0}
        return web.json_response(answer)

    async def release(self, request: web.Request) -> web.Response:
        self.released.append((await request.json())["session_id"])
        return web.json_response({})


@dataclass
class Rig:
    ctx: RunContext
    log: MemoryLog
    router: Router
    http: aiohttp.ClientSession
    controller: Writer
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.ctx.endpoints.session_urls[0]

    async def start(self, index: int = 0) -> None:
        task = asyncio.create_task(serve(self.ctx, index, self.log.view()))
        self.tasks.append(task)
        url = self.ctx.endpoints.session_urls[index]
        async with asyncio.timeout(10):
            while True:
                if task.done():
                    task.result()
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.http.get(url + "/healthz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    async def call(
        self, method: str, path: str, body: object = None, token: str = "worker", status: int = 200, **headers: str
    ) -> Any:
        """JSON answer (or bytes) of a request whose status must be `status`."""
        url = path if path.startswith("http") else self.url + path
        head = {"Authorization": f"Bearer {token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.http.request(method, url, json=body, headers=head) as answer:
            data = await answer.read()
            assert answer.status == status, (answer.status, data)
            return json.loads(data) if answer.content_type == "application/json" else data

    async def open(self, **body: object) -> Client:
        return Client(self, await self.call("POST", "/sessions", body))

    async def lease(self) -> Client:
        return Client(self, await self.call("POST", "/rollouts/lease", {"wait_s": 5}))

    def kill_engine(self, url: str) -> None:
        PROCESSES[url].kill()

    async def command(self, body: Body) -> None:
        await self.controller.append(body, targets=("session-0",))

    async def fact(self, body: Body) -> None:
        await self.controller.append(body)

    async def admit(self, admission: int, *, groups: int = 4, size: int = 2, purpose: Any = "train") -> None:
        await self.command(
            OpenAdmission(
                admission=admission, purpose=purpose, step=admission, first_group=0, end_group=groups, group_size=size
            )
        )
        await self.until("work.admission_opened", lambda b: b.admission == admission)

    async def close(self, pause: int) -> None:
        await self.command(CloseAdmission(pause=pause))
        await self.until("work.admission_closed", lambda b: b.pause == pause)

    async def resume(self, pause: int, engine_id: str = "engine-0") -> None:
        await self.fact(EngineResumed(pause=pause, engine_id=engine_id, version=0))

    async def events(self, name: str = "") -> list[Any]:
        """Bodies of the events whose type starts with `name`, in order."""
        found = await self.log.read(0, limit=100_000)
        return [event.body for event in found if event.envelope.type.startswith(name)]

    async def until(self, name: str, wanted: Callable[[Any], bool] = lambda body: True, count: int = 1) -> list[Any]:
        """Wait for `count` such events."""
        async with asyncio.timeout(15):
            while True:
                found = [body for body in await self.events(name) if wanted(body)]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.005)


@dataclass
class Client:
    """One session seen from its environment."""

    rig: Rig
    opened: dict[str, Any]

    @property
    def path(self) -> str:
        return f"/sessions/{self.opened['session_id']}"

    async def call(self, method: str, path: str, body: object = None, status: int = 200, **headers: str) -> Any:
        return await self.rig.call(method, self.path + path, body, self.opened["token"], status, **headers)

    async def chat(self, *contents: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """One turn whose messages alternate user, assistant, user ..."""
        messages = [
            {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(contents)
        ]
        whole = {"messages": messages, **body}
        return await self.call("POST", "/v1/chat/completions", whole, status, **(headers or {}))

    async def view(self) -> Any:
        return await self.call("GET", "")

    async def finish(self, **body: Any) -> Any:
        return await self.call("POST", "/finish", body)


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine(model: Path) -> Iterator[str]:
    """Answers at once."""
    with fake_engine(model, "--enable-return-routed-experts", "--eos-p", "0.05") as url:
        yield url


@pytest.fixture(scope="session")
def slow_engine(model: Path) -> Iterator[str]:
    """10 ms a token and no end before max_tokens."""
    with fake_engine(model, "--enable-return-routed-experts", "--eos-p", "0", "--token-s", "0.01") as url:
        yield url


def make_config(model: Path, **changes: Any) -> Config:
    config = Config(
        model=Model(path=str(model)),
        engine=Engine(kind="fake"),
        rollout=Rollout(max_turn_tokens=32, turn_deadline_s=20.0, group_size=2),
    )
    return msgspec.structs.replace(config, **changes)


def with_r3(config: Config) -> Config:
    return msgspec.structs.replace(config, r3=R3(enabled=True))


RigFactory = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def rig_of(model: Path, tmp_path: Path) -> RigFactory:
    """`async with rig_of(engine_url, config=...) as rig`: a started server."""

    @contextlib.asynccontextmanager
    async def make(*engines: str, config: Config | None = None, servers: int = 1) -> AsyncIterator[Rig]:
        config = config or make_config(model)
        counted = msgspec.structs.replace(config.session_server, count=servers)
        config = msgspec.structs.replace(config, session_server=counted)
        router = Router({f"engine-{index}": url for index, url in enumerate(engines)})
        app = web.Application()
        app.add_routes([web.post("/assign", router.assign), web.post("/release", router.release)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        router.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        endpoints = Endpoints(
            log_url="", router_url=router.url, ray_address="", ray_temp_dir="",
            session_urls=tuple(f"http://127.0.0.1:{free_port()}" for _ in range(servers)), admin_token="admin",
            worker_token="worker",
        )  # fmt: skip
        log = MemoryLog("run")
        async with aiohttp.ClientSession() as http, await Writer.open(log, "controller") as controller:
            rig = Rig(RunContext("run", tmp_path, config, endpoints), log, router, http, controller)
            try:
                for index in range(servers):
                    await rig.start(index)
                yield rig
            finally:
                await rig.stop()
                await runner.cleanup()

    return make


@contextlib.asynccontextmanager
async def broken_engine() -> AsyncIterator[str]:
    """Answers with one route row too few."""

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        rows = len(body["input_ids"]) - body.get("routed_experts_start_len", 0) - 1
        data = base64.b64encode(bytes(4 * rows * LAYERS * TOP_K)).decode()
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop"}, "completion_tokens": 1, "routed_experts": data,
            "prompt_tokens": len(body["input_ids"]), "output_token_logprobs": [[-1.0, 2, None]], "weight_version": "0",
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": [2], "meta_info": meta})

    async def abort(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", abort)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
