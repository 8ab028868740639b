"""Composition root: which processes a run has, in which order they come up, and how everything ends.

The supervisor holds no logic of the run. It starts the log server, then the controller (whose RunStarted or RunResumed
is the first word of every start), then all others at once; it follows the log for the display and ends when
RunStopped stands in it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from controller import rundir
from controller.memory import MemoryWatch
from controller.supervisor import ChildSpec, Supervisor
from segue import boot
from segue.boot import RunContext
from segue.config.schema import Config
from segue.errors import ConfigError, LogError, ProcessError
from segue.events import run
from segue.events.codec import Recorded
from segue.log import EventLog, Writer, follow, open_log
from segue.log.reader import segment_dir
from segue.log.sealing import seal
from segue.log.server import ServerCommand, end_leftover, server_command, wait_ready
from segue.progress import Display

log = logging.getLogger("supervisor")

LOG_READY_S = 30.0
FIRST_WORD_S = 30.0
STOP_WAIT_S = 15.0
SEAL_DEADLINE_S = 120.0
DISPLAY_GATHER_S = 0.2
RAY_STORE_FLOOR_BYTES = 80 * 1024 * 1024
"""Ray refuses an object store below about 75 MiB; samples and weights do not travel through it."""


@dataclass(slots=True)
class Outcome:
    """How a run ended, and what its summary needs beside the log."""

    reason: str = ""
    detail: str = ""
    started_wall_s: float = field(default_factory=time.time)
    peak_rss_bytes: int = 0
    restarts: dict[str, int] = field(default_factory=dict)


def prepare_model(config: Config) -> None:
    """Make the model folder with `model.prepare` if it is not there yet."""
    path = Path(config.model.path)
    if not (path / "config.json").is_file() and config.model.prepare:
        argv = [_python(part) for part in config.model.prepare]
        result = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=1800)
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines()
            raise ConfigError(f"model.prepare failed ({' '.join(argv)}): {said[-1] if said else 'it said nothing'}")
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {path} holds no config.json; give the folder of a model in Hugging Face layout, "
            f"or a command that makes it in model.prepare"
        )


def _python(part: str) -> str:
    return sys.executable if part == "{python}" else part


async def supervise(folder: Path, config: Config, display: Display) -> Outcome:
    """Bring the run in `folder` up, keep it up until it stops, and leave no process behind."""
    outcome = Outcome()
    boot.configure_logging(folder, "supervisor")
    server = _log_server(folder, config)
    ctx = rundir.open_endpoints(folder, config, server.url if server else config.log.url)
    keeper = _Keeper(ctx, display, outcome)
    try:
        await keeper.run(server)
    finally:
        if not config.ray.address:
            shutil.rmtree(ctx.endpoints.ray_temp_dir, ignore_errors=True)
    return outcome


def _log_server(folder: Path, config: Config) -> ServerCommand | None:
    if config.log.url:
        return None
    end_leftover(folder)
    return server_command(folder, fsync=config.log.fsync)


class _Keeper:
    def __init__(self, ctx: RunContext, display: Display, outcome: Outcome) -> None:
        self.ctx, self.display, self.outcome = ctx, display, outcome
        self.supervisor = Supervisor(self._restarted)
        self.memory = MemoryWatch()
        self.writer: Writer | None = None
        self.interrupts = 0
        self.stop_deadline: asyncio.TimerHandle | None = None

    async def run(self, server: ServerCommand | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._work(server, group))
                for signum in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(signum, self._interrupt, work)
        except* ProcessError as errors:
            self.outcome.reason, self.outcome.detail = "failed", str(errors.exceptions[0])
        except* LogError as errors:
            self.outcome.reason, self.outcome.detail = "failed", str(errors.exceptions[0])
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)
            await self.supervisor.stop()
            self.outcome.peak_rss_bytes = self.memory.peak_bytes
            self.outcome.restarts = self.supervisor.restart_counts()

    def _interrupt(self, work: asyncio.Task[None]) -> None:
        """First ctrl-C: ask the controller for a clean stop. Second: end everything now."""
        self.interrupts += 1
        if self.interrupts > 1 or self.writer is None:
            self.outcome.reason = self.outcome.reason or "interrupted"
            work.cancel()
            return
        command = run.StopRun("asked for by a person", self.display.view.restarts_of_run)
        self.writer.submit(command, targets=("supervisor",)).add_done_callback(lambda done: done.exception())
        self.stop_deadline = asyncio.get_running_loop().call_later(STOP_WAIT_S, work.cancel)
        self.outcome.reason = "interrupted"

    async def _work(self, server: ServerCommand | None, group: asyncio.TaskGroup) -> None:
        watch = group.create_task(self.memory.watch())
        events: EventLog | None = None
        try:
            if server is not None:
                await self._start_log(server, group)
            events = await open_log(self.ctx)
            async with await Writer.open(events, "supervisor") as self.writer:
                before = await events.tail()
                self._start("controller", ["-m", "controller", *self._run_dir()], group, ends_well=True)
                await self._first_word(events, before)
                self._start_others(group)
                await self._follow(events)
        finally:
            self.writer = None
            watch.cancel()
            if self.stop_deadline is not None:
                self.stop_deadline.cancel()
            try:
                await self._close(events)
            finally:
                self.supervisor.kill()

    async def _close(self, events: EventLog | None) -> None:
        """End everything, the log server last: what the others say while they end is sealed with the rest."""
        await self.supervisor.stop([c.spec.name for c in self.supervisor.children if c.spec.name != "log"])
        if events is not None:
            try:
                await asyncio.wait_for(seal(events, segment_dir(self.ctx.run_dir)), SEAL_DEADLINE_S)
            except (LogError, TimeoutError) as error:
                log.warning("the log was not sealed: %s", error)
            await events.close()
        await self.supervisor.stop()

    async def _start_log(self, server: ServerCommand, group: asyncio.TaskGroup) -> None:
        spec = ChildSpec("log", server.argv, server.log_file)
        child = self.supervisor.start(spec, group)
        await asyncio.wait_for(child.started.wait(), LOG_READY_S)
        assert child.process is not None
        await wait_ready(server.url, LOG_READY_S, log_file=server.log_file, pid=child.process.pid)

    async def _first_word(self, events: EventLog, before: int) -> None:
        """The controller speaks first, so that a resumed run forgets the processes of its earlier life."""
        position, deadline = before, time.monotonic() + FIRST_WORD_S
        while time.monotonic() < deadline:
            for event in await events.read(position, wait_s=0.5):
                position = event.position
                if isinstance(event.body, run.RunStarted | run.RunResumed):
                    return
        raise ProcessError(f"the controller said nothing within {FIRST_WORD_S:.0f} s; see logs/controller.log")

    def _run_dir(self) -> list[str]:
        return ["--run-dir", str(self.ctx.run_dir)]

    def _start(self, name: str, arguments: list[str], group: asyncio.TaskGroup, *, ends_well: bool = False) -> None:
        log_file = self.ctx.run_dir / "logs" / f"{name}.out"
        self.supervisor.start(ChildSpec(name, (sys.executable, *arguments), log_file, ends_well=ends_well), group)

    def _start_others(self, group: asyncio.TaskGroup) -> None:
        config, run_dir = self.ctx.config, self._run_dir()
        if not config.ray.address:
            self.supervisor.start(self._ray(), group)
        self._start("supervise", ["-m", "actors.supervise", *run_dir], group)
        for i in range(config.session_server.count):
            self._start(f"session-{i}", ["-m", "session_server", *run_dir, "--index", str(i)], group)
        self._start("router", ["-m", "router", *run_dir], group)
        if config.environment.command:
            for i in range(config.environment.workers):
                self.supervisor.start(self._environment(i), group)

    def _ray(self) -> ChildSpec:
        config, endpoints = self.ctx.config, self.ctx.endpoints
        host, _, port = endpoints.ray_address.rpartition(":")
        store = max(config.ray.object_store_mb * 1024 * 1024, RAY_STORE_FLOOR_BYTES)
        argv = (
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--node-ip-address={host}",
            f"--port={port}", f"--num-cpus={config.ray.num_cpus}", f"--object-store-memory={store}",
            f"--temp-dir={endpoints.ray_temp_dir}", "--include-dashboard=false", "--include-log-monitor=false",
            "--disable-usage-stats", "--log-color=false",
        )  # fmt: skip
        # SIGTERM: `ray start --block` then ends the daemons it started, which SIGKILL would leave behind.
        return ChildSpec(
            "ray", argv, self.ctx.run_dir / "logs" / "ray.out", env=_ray_environment(), death_signal=signal.SIGTERM
        )

    def _environment(self, index: int) -> ChildSpec:
        environment, endpoints = self.ctx.config.environment, self.ctx.endpoints
        env = {
            **environment.env,
            "SEGUE_BASE_URL": endpoints.session_urls[index % len(endpoints.session_urls)],
            "SEGUE_WORKER_TOKEN": endpoints.worker_token,
            "SEGUE_CONCURRENCY": str(environment.concurrency),
            "SEGUE_WORKER": f"env-{index}",
            "OMP_NUM_THREADS": "1",
        }
        argv = tuple(_python(part) for part in environment.command)
        return ChildSpec(f"env-{index}", argv, self.ctx.run_dir / "logs" / f"env-{index}.out", env=env)

    async def _follow(self, events: EventLog) -> None:
        async for event in follow(events, gather_s=DISPLAY_GATHER_S):
            self.display.apply(event)
            if self._ends_run(event):
                return

    def _ends_run(self, event: Recorded) -> bool:
        if isinstance(event.body, run.RunStarted | run.RunResumed):
            self.outcome.reason = "interrupted" if self.interrupts else ""
        if isinstance(event.body, run.RunStopped):
            ended_here = event.envelope.wall_s >= self.outcome.started_wall_s
            self.outcome.reason, self.outcome.detail = event.body.reason, event.body.detail
            return ended_here
        return False

    async def _restarted(self, name: str, count: int, code: int, backoff_s: float) -> None:
        if self.writer is not None and name != "log":
            await self.writer.append(run.ProcessRestarted(name, count, code, backoff_s))


def _ray_environment() -> dict[str, str]:
    return {
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        # Ray's metrics agent costs memory and writes nothing that we read.
        "RAY_enable_metrics_collection": "0",
        # Ray would run actors, and with them engine and trainer, behind everything else on the machine.
        "RAY_worker_niceness": "0",
        # Nothing on this node is worth 30 seconds of draining: the actors have ended before Ray does.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "OMP_NUM_THREADS": "1",
    }
