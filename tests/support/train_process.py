"""`segue train` as a process under test: start it, read its log while it runs, kill parts of it, wait for its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from segue.errors import LogError
from segue.events import Body, Recorded
from segue.log.reader import open_reader

ROOT = Path(__file__).resolve().parents[2]
SEGUE = Path(sys.executable).parent / "segue"
POLL_S = 0.25


class TrainProcess:
    """One start of `segue train`. Leaving the context kills whatever is left of it."""

    def __init__(self, runs: Path, arguments: list[str]) -> None:
        self.runs, self.arguments = runs, arguments
        self.output = runs / f"output-{time.monotonic_ns()}.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        self.runs.mkdir(parents=True, exist_ok=True)
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [str(SEGUE), "train", *self.arguments, "--plain"], cwd=ROOT, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remember()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        for child in self.seen:
            if child.is_running():
                child.kill()

    @property
    def folder(self) -> Path:
        """The run's folder: the newest one under `runs`."""
        found = sorted(self.runs.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        assert found, f"no run was made: {self.text()}"
        return found[-1].parent

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def remember(self) -> None:
        """Note all descendants, so that one that is left behind later can be told."""
        if self.process is not None and self.process.poll() is None:
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))

    def find(self, mark: str) -> psutil.Process:
        """The descendant whose command line or title contains `mark`; the first one started."""
        assert self.process is not None
        self.remember()
        found = [p for p in psutil.Process(self.process.pid).children(recursive=True) if mark in " ".join(_title(p))]
        assert found, f"no process with {mark!r} among {[_title(p) for p in self.seen if p.is_running()]}"
        return min(found, key=lambda p: p.create_time())

    def kill(self, mark: str) -> None:
        self.find(mark).send_signal(signal.SIGKILL)

    def kill_supervisor(self) -> None:
        self.remember()
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def interrupt(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGINT)

    def wait(self, deadline_s: float) -> int:
        assert self.process is not None
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self.remember()
            assert time.monotonic() < end, f"still running after {deadline_s} s: {self.text()}"
            time.sleep(POLL_S)
        return self.process.returncode

    def survivors(self, deadline_s: float = 15.0) -> list[list[str]]:
        """Descendants that are still there after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and any(_alive(p) for p in self.seen):
            time.sleep(POLL_S)
        return [_title(p) for p in self.seen if _alive(p)]

    def events(self) -> list[Recorded]:
        return asyncio.run(_read(self.folder))

    def _events_so_far(self) -> list[Recorded]:
        try:
            return self.events()
        except (LogError, OSError):  # the log server is only coming up
            return []

    def bodies[B: Body](self, kind: type[B]) -> list[B]:
        return [e.body for e in self.events() if isinstance(e.body, kind)]

    def until(self, met: Callable[[list[Recorded]], bool], deadline_s: float) -> None:
        """Wait until the log fulfils `met`; fails at the deadline or when the process ends."""
        end = time.monotonic() + deadline_s
        while True:
            self.remember()
            assert self.process is not None
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
            assert time.monotonic() < end, f"not met in {deadline_s} s: {self.text()}"
            if list(self.runs.glob("*/endpoints.json")) and met(self._events_so_far()):
                return
            time.sleep(POLL_S)


async def _read(folder: Path) -> list[Recorded]:
    reader = await open_reader(folder)
    try:
        events: list[Recorded] = []
        while batch := await reader.read(len(events), limit=4096):
            events.extend(batch)
        return events
    finally:
        await reader.close()


def _title(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
