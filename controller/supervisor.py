"""Keeps child processes alive: starts them, restarts them with a back-off, ends them all.

No decisions about the run live here. Children are started in their own session (a ctrl-C reaches the supervisor alone)
and die with it: each asks the kernel for a signal at its parent's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from segue.boot import die_with_parent
from segue.clock import Clock, SystemClock
from segue.errors import ProcessError

log = logging.getLogger("supervisor")

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.2, 10.0
HEALTHY_AFTER_S = 60.0
"""A child that lived this long starts over at the first back-off."""
MAX_RAPID_DEATHS = 6
TERM_WAIT_S = 8.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child. `death_signal`: what it gets when the supervisor dies. `log_file` takes stdout and stderr."""

    name: str
    argv: tuple[str, ...]
    log_file: Path
    env: dict[str, str] = field(default_factory=dict)
    death_signal: int = signal.SIGKILL
    ends_well: bool = False
    """Exit code 0 means that it is done and need not be started again."""
    before_start: Callable[[], Awaitable[None]] | None = None


Restarted = Callable[[str, int, int, float], Awaitable[None]]
"""(name, count, exit code, back-off in s): called before a child is started again."""


class Child:
    """Runs one child until told to stop."""

    def __init__(self, spec: ChildSpec, clock: Clock) -> None:
        self.spec, self.clock = spec, clock
        self.process: asyncio.subprocess.Process | None = None
        self.started = asyncio.Event()
        self.restarts = 0
        self.stopping = False

    async def keep(self, restarted: Restarted) -> None:
        """Start, wait, start again. Raises ProcessError when it keeps dying right after its start."""
        rapid = 0
        while not self.stopping:
            born_s = self.clock.mono_s()
            code = await self._live()
            if self.stopping or (code == 0 and self.spec.ends_well):
                return
            rapid = 0 if self.clock.mono_s() - born_s > HEALTHY_AFTER_S else rapid + 1
            if rapid >= MAX_RAPID_DEATHS:
                raise ProcessError(
                    f"{self.spec.name} died {rapid} times right after its start (exit code {code}): "
                    f"{last_line(self.spec.log_file)} [log: {self.spec.log_file}]"
                )
            backoff_s = min(BACKOFF_FIRST_S * 2 ** max(rapid - 1, 0), BACKOFF_LAST_S)
            self.restarts += 1
            log.warning("%s ended with %s; starting it again in %.1f s", self.spec.name, code, backoff_s)
            await restarted(self.spec.name, self.restarts, code, backoff_s)
            await self.clock.sleep(backoff_s)

    async def _live(self) -> int:
        if self.spec.before_start is not None:
            await self.spec.before_start()
        self.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_file.open("ab") as output:
            death_signal = self.spec.death_signal
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.env},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(death_signal),
            )
        self.started.set()
        log.info("%s started, pid %d", self.spec.name, self.process.pid)
        try:
            return await self.process.wait()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            await self.process.wait()
            raise

    async def stop(self) -> None:
        """SIGTERM to its process group, then SIGKILL after TERM_WAIT_S."""
        self.stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), TERM_WAIT_S)
        except TimeoutError:
            log.warning("%s did not end in %.0f s; killing it", self.spec.name, TERM_WAIT_S)
        self._signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERM_WAIT_S)

    def _signal(self, signum: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)


def last_line(path: Path, tail_bytes: int = 8192) -> str:
    """The last line of a log that says something, for one-line error messages."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - tail_bytes))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "it wrote no log"
    return lines[-1] if lines else "it wrote nothing to its log"


class Supervisor:
    """A family of children. Use as a context manager; leaving it ends them in reverse order of their start."""

    def __init__(self, restarted: Restarted, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.children: list[Child] = []
        self._restarted = restarted
        self._keepers: list[asyncio.Task[None]] = []

    def start(self, spec: ChildSpec, group: asyncio.TaskGroup) -> Child:
        child = Child(spec, self.clock)
        self.children.append(child)
        self._keepers.append(group.create_task(child.keep(self._restarted), name=f"keep-{spec.name}"))
        return child

    async def stop(self, names: Sequence[str] | None = None) -> None:
        """End the named children (all by default), the last started first."""
        for child in reversed(self.children):
            if names is None or child.spec.name in names:
                await child.stop()

    def kill(self) -> None:
        """End what is left at once and let the keepers go; for a shutdown that was itself cut short."""
        for keeper in self._keepers:
            keeper.cancel()

    def restart_counts(self) -> dict[str, int]:
        return {child.spec.name: child.restarts for child in self.children}
