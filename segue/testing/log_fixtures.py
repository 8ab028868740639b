"""Logs for tests: a real embedded server that can be killed and started again, and one fixture over both logs.

Import the fixtures into a test module (or a conftest): `from segue.testing.log_fixtures import log_server, world`.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol

import pytest

from segue.boot import die_with_parent
from segue.ids import fresh_id
from segue.log import redis, server
from segue.log.memory import MemoryLog
from segue.log.protocol import EventLog
from segue.log.redis import RedisLog

START_DEADLINE_S = 20.0


class LogServer:
    """An embedded log server over `run_dir`. Start it, kill it, start it again: it comes back with its data."""

    def __init__(self, run_dir: Path, *, fsync: Literal["everysec", "always"] = "everysec", host: str = "") -> None:
        self.run_dir = run_dir
        self.command = server.server_command(run_dir, fsync=fsync, host=host)
        self._process: subprocess.Popen[bytes] | None = None
        self._opened: list[RedisLog] = []

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Start the process without waiting for it."""
        # restore_signals=False keeps SIGXFSZ ignored, so that a file size limit shows as a write error.
        self._process = subprocess.Popen(self.command.argv, preexec_fn=die_with_parent, restore_signals=False)

    async def start(self) -> None:
        self.spawn()
        await self.ready()

    async def ready(self) -> None:
        await server.wait_ready(self.url, START_DEADLINE_S, log_file=self.command.log_file, pid=self.pid)

    async def open(self, run: str, *, url: str = "") -> RedisLog:
        """The log of `run` as one more process sees it (reached by another `url`, if given); `close_logs` closes it."""
        self._opened.append(await redis.connect(url or self.url, run))
        return self._opened[-1]

    async def close_logs(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End the process and wait for it; nothing if it is not running."""
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(START_DEADLINE_S)
            self._process = None


@pytest.fixture(scope="session")
def log_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogServer]:
    """One embedded server for the whole session; tests keep apart by their run ids."""
    made = LogServer(tmp_path_factory.mktemp("log-server"))
    made.spawn()
    try:
        # In a thread of its own: an async fixture may ask for this one while its loop runs.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(made.ready())).result(START_DEADLINE_S + 5)
        yield made
    finally:
        made.kill()


class World(Protocol):
    """A log as several processes see it."""

    run: str

    async def open(self) -> EventLog:
        """The log as one more process sees it."""
        ...


class MemoryWorld:
    def __init__(self) -> None:
        self.run = fresh_id("run")
        self._log = MemoryLog(self.run)

    async def open(self) -> EventLog:
        return self._log.view()


class RedisWorld:
    def __init__(self, log_server: LogServer) -> None:
        self.run = fresh_id("run")
        self._server = log_server

    async def open(self) -> EventLog:
        return await self._server.open(self.run)


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each test runs against the log in memory and against a real server."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    log_server = request.getfixturevalue("log_server")
    try:
        yield RedisWorld(log_server)
    finally:
        await log_server.close_logs()


@pytest.fixture
async def log(world: World) -> EventLog:
    """The log as one process sees it."""
    return await world.open()
