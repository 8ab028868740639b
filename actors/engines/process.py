"""One engine process and all that it starts, from launch to the last exit.

Invariants: the engine leads a process group of its own, so ending it ends its whole tree; it dies with its owner,
whatever kills the owner; `start()` either returns with an engine that answers /health or leaves nothing running.
The owner's thread that calls `start()` must live as long as the engine (see lifeline).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import psutil

from actors.engines.lifeline import die_with_parent
from actors.engines.options import LaunchSpec
from segue.errors import EngineError

POLL_S = 0.1
REAP_S = 15.0
LOG_TAIL_LINES = 25


class EngineProcess:
    """Starts the command of a LaunchSpec and ends it; `name` stands in every error message."""

    def __init__(self, spec: LaunchSpec, *, name: str) -> None:
        self.spec, self.name = spec, name
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Process id, which is the process group's too; EngineError before the first start."""
        if self._process is None:
            raise EngineError(f"engine {self.name} was never started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the engine's main process runs; once it ends, what it started is killed by the kernel."""
        return self._process is not None and self._process.returncode is None

    async def start(self, *, deadline_s: float) -> None:
        """Launch and wait until /health answers 200.

        EngineError with the end of the log if the process exits first or `deadline_s` seconds pass.
        """
        if self.alive:
            raise EngineError(f"engine {self.name} runs already (pid {self.pid})")
        await self._refuse_taken_port()
        self._process = await self._launch()
        try:
            async with asyncio.timeout(deadline_s):
                await self._healthy()
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise EngineError(self._story(f"did not answer /health within {deadline_s:g} s")) from error
            raise

    async def wait(self) -> int:
        """Exit status, once the engine has ended (negative: killed by that signal)."""
        if self._process is None:
            raise EngineError(f"engine {self.name} was never started")
        return await self._process.wait()

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """End the whole tree. Idempotent.

        There is nothing in an engine worth saving and its orderly exit takes seconds, so it is killed at once unless
        `grace_s` is given.
        """
        if self._process is None:
            return
        if grace_s > 0 and self.alive:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self._signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(REAP_S):
                await self._process.wait()
                while _running_members(self._process.pid):  # noqa: ASYNC110 - nothing tells of a grandchild's exit
                    await asyncio.sleep(POLL_S / 2)
        except TimeoutError as error:
            raise EngineError(f"engine {self.name} (pid {self.pid}) survived SIGKILL for {REAP_S:g} s") from error

    # --- parts ------------------------------------------------------------------------------------------------------

    async def _refuse_taken_port(self) -> None:
        address = urlsplit(self.spec.url)
        try:
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
        except (OSError, TimeoutError):
            return
        writer.close()
        raise EngineError(f"engine {self.name} cannot start: something listens on {address.netloc} already")

    async def _launch(self) -> asyncio.subprocess.Process:
        owner = os.getpid()
        self.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_file.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self.spec.env},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(owner),
            )

    async def _healthy(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while not await _answers(session, self.spec.url + "/health"):
                if self._process is not None and self._process.returncode is not None:
                    raise EngineError(self._story(f"exited with status {self._process.returncode} at start"))
                await asyncio.sleep(POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.pid, number)

    def _story(self, what: str) -> str:
        tail = "\n".join(_tail(self.spec.log_file, LOG_TAIL_LINES))
        return f"engine {self.name} {what}; the end of {self.spec.log_file}:\n{tail}"


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _tail(file: Path, lines: int) -> list[str]:
    with file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 65536))
        return log.read().decode("utf-8", "replace").splitlines()[-lines:]


def _running_members(group: int) -> bool:
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False
