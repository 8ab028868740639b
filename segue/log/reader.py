"""Open a run's log for reading, wherever it is: live, sealed, both, or left behind by a crash.

Sealed segments come first and the live log goes on where they end; where both have an event they must agree. A run
whose server is gone is read through a private server over a copy of its append-only file: the original stays as the
crash left it, ready for `--resume`.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path

from segue.boot import RunContext, die_with_parent
from segue.errors import LogCorruptError, LogError, LogTrimmedError, LogUnavailable
from segue.events import codec
from segue.events.codec import Recorded
from segue.log import redis, server
from segue.log.file import FileLog
from segue.log.redis import RedisLog
from segue.log.sealing import Readable, has_segments

LIVE_TIMEOUT_S = 5.0
"""How long a live server has to answer."""
LOAD_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


def segment_dir(run_dir: Path) -> Path:
    """Where a run's sealed segments are."""
    return run_dir / "segments"


class RunReader:
    """The reading side of an EventLog over sealed files and a live log, either of which may be absent."""

    def __init__(self, sealed: Path | None, live: RedisLog | None, copy: _ServerOverCopy | None = None) -> None:
        self._sealed, self._live, self._copy = sealed, live, copy
        self._files: FileLog | None = None
        self._refresh()
        source = self._live or self._files
        if source is None:
            raise LogError(f"there is neither a live log nor anything sealed in {sealed}")
        self.run = source.run

    @property
    def is_live(self) -> bool:
        """Whether the log can still grow."""
        return self._live is not None and self._copy is None

    def _refresh(self) -> None:
        if self._sealed is not None and (self._sealed.is_file() or has_segments(self._sealed)):
            self._files = FileLog(self._sealed)

    async def check(self) -> None:
        """Raise LogCorruptError if files and live log are not one and the same log."""
        if self._files is None or self._live is None:
            return
        end = await self._files.tail()
        if self._files.run != self._live.run or await self._live.tail() < end:
            raise LogCorruptError(f"{self._live.url} is not the log that {self._sealed} was sealed from")
        try:
            live = await self._live.read(end - 1, limit=1)
        except LogTrimmedError:
            return
        sealed = await self._files.read(end - 1, limit=1)
        if codec.encode(live[0].envelope) != codec.encode(sealed[0].envelope):
            raise LogCorruptError(f"position {end} differs between {self._live.url} and {self._sealed}")

    async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]:
        """As EventLog.read."""
        for retry in (False, True):
            if self._files is not None and (self._live is None or after < await self._files.tail()):
                return await self._files.read(after, limit=limit)
            assert self._live is not None
            try:
                return await self._live.read(after, limit=limit, wait_s=wait_s)
            except LogTrimmedError:
                if retry:
                    raise
                self._refresh()  # sealed and trimmed since the files were listed
        raise AssertionError("unreachable")

    async def tail(self) -> int:
        if self._live is not None:
            return await self._live.tail()
        assert self._files is not None
        return await self._files.tail()

    async def close(self) -> None:
        try:
            if self._live is not None:
                await self._live.close()
        finally:
            if self._copy is not None:
                self._copy.stop()


class _ServerOverCopy:
    """A private server over a copy of a dead run's append-only file."""

    def __init__(self, run_dir: Path) -> None:
        """Make the copy (some seconds for a long run: call it in a thread)."""
        self.folder = Path(tempfile.mkdtemp(prefix="segue-log-"))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            shutil.copytree(server.log_dir(run_dir) / "aof", server.log_dir(self.folder) / "aof")
        except BaseException:
            self.stop()
            raise

    async def connect(self, run: str) -> RedisLog:
        # Not in a thread: the kernel ends the server with the *thread* that started it.
        command = server.server_command(self.folder)
        self._process = _start(command)
        await server.wait_ready(command.url, LOAD_TIMEOUT_S, log_file=command.log_file, pid=self._process.pid)
        return await redis.connect(command.url, run)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.folder)


def _start(command: server.ServerCommand) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command.argv, preexec_fn=die_with_parent)


async def open_reader(where: Path | str, run: str = "") -> RunReader:
    """Open the log of a run's folder, a folder of segments, an exported file, or a server's URL.

    A URL needs `run`, unless the server holds one run only. Close the reader. Raises LogError if there is nothing to
    read, LogCorruptError if what is there contradicts itself.
    """
    if isinstance(where, str) and "://" in where:
        run = run or await _only_run(where)
        return RunReader(None, await redis.connect(where, run, connect_timeout_s=LIVE_TIMEOUT_S))
    reader = await _open_path(Path(where))
    try:
        await reader.check()
    except BaseException:
        await reader.close()
        raise
    return reader


async def _open_path(path: Path) -> RunReader:
    if not (path / "endpoints.json").exists():
        return RunReader(path, None)
    ctx = RunContext.load(path)
    sealed = segment_dir(path)
    embedded = (server.log_dir(path) / "aof").is_dir()
    if server.is_running(path) or not embedded:
        try:
            live = await redis.connect(ctx.endpoints.log_url, ctx.run_id, connect_timeout_s=LIVE_TIMEOUT_S)
            return RunReader(sealed, live)
        except LogUnavailable:
            if embedded or not has_segments(sealed):
                raise  # embedded: alive but busy, and writing its files
            return RunReader(sealed, None)
    copy = await asyncio.to_thread(_ServerOverCopy, path)
    try:
        return RunReader(sealed, await copy.connect(ctx.run_id), copy)
    except BaseException:
        copy.stop()
        raise


async def _only_run(url: str) -> str:
    probe = await redis.connect(url, "probe", connect_timeout_s=LIVE_TIMEOUT_S)
    try:
        runs = await probe.runs()
    finally:
        await probe.close()
    if len(runs) != 1:
        raise LogError(f"{redis.public_url(url)} holds {len(runs)} runs ({', '.join(runs) or 'none'}): say which one")
    return runs[0]


__all__ = ["Readable", "RunReader", "open_reader", "segment_dir"]
