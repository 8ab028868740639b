"""The rollout actor: owns one engine process, carries out the commands for it, reports what becomes of it.

The engine is the actor's child and is started again by it. A command that meets a dead engine waits for the next
incarnation; every engine call has a deadline, and an engine that answers wrongly too often is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
from pathlib import Path

import msgspec

from actors.commands import CommandStream
from actors.device import dtype_of
from actors.engines import EngineOptions, LaunchSpec, launch_spec
from actors.engines.http import EngineControl
from actors.engines.process import EngineProcess
from actors.residency import engine_residency
from segue.boot import RunContext
from segue.config.capabilities import realise
from segue.errors import EngineError, EngineUnavailable
from segue.events import engine, offload, run
from segue.ids import fresh_id
from segue.log import Delivery, EventLog, Writer
from segue.ports import free_port

log = logging.getLogger("actors.rollout")

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.5, 20.0
FAILED_STARTS = 2
"""An engine that fails to start this often before it was ever up ends the run: its configuration is wrong."""
COMMAND_TRIES = 3


class RolloutActor:
    """One engine and its command stream. `run()` returns only by cancellation or by an error that ends the actor."""

    def __init__(self, ctx: RunContext, engine_id: str) -> None:
        self.ctx, self.engine_id = ctx, engine_id
        self.process: EngineProcess | None = None
        self.control: EngineControl | None = None
        self.incarnation = ""
        self.residency = engine_residency(ctx.config.offload.sizes_gib)
        self._connections = contextlib.AsyncExitStack()
        self.up = asyncio.Event()
        self.restarts = 0
        self.was_up = False

    async def run(self, events: EventLog) -> None:
        try:
            async with await Writer.open(events, self.engine_id) as writer:
                stream = CommandStream(events, writer, self.engine_id, self.engine_id)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._keep_engine(writer))
                    group.create_task(self._serve(stream, writer))
        finally:
            await self._connections.aclose()
            if self.process is not None:
                await self.process.stop()

    async def _keep_engine(self, writer: Writer) -> None:
        failures = 0
        while True:
            try:
                await self._start(writer)
            except EngineError as error:
                failures += 1
                log.error("start failed: %s", error)
                if self.process is not None:  # healthy, but it failed its probe: the next start makes another one
                    await self.process.stop()
                if failures >= FAILED_STARTS and not self.was_up:
                    await writer.append(run.AlarmRaised("fatal", self.engine_id, str(error)))
                await self._back_off(writer, failures, -1)
                continue
            failures = 0
            assert self.process is not None
            code = await self.process.wait()
            self.up.clear()
            reason = f"the engine process ended with exit code {code}"
            await writer.append(engine.EngineLost(self.engine_id, self.incarnation, reason))
            await self.process.stop()
            await self._back_off(writer, 1, code)

    async def _back_off(self, writer: Writer, failures: int, code: int) -> None:
        pause_s = min(BACKOFF_FIRST_S * 2.0**failures, BACKOFF_LAST_S)
        self.restarts += 1
        await writer.append(run.ProcessRestarted(self.engine_id, self.restarts, code, pause_s))
        await asyncio.sleep(pause_s)

    def _options(self) -> EngineOptions:
        config = self.ctx.config
        host = "127.0.0.1" if not config.ray.address else socket.gethostbyname(socket.gethostname())
        return EngineOptions(
            model_path=Path(config.model.path),
            host=host,
            port=free_port(host),
            device=config.engine.device,
            dtype=dtype_of(config),
            max_total_tokens=config.engine.max_total_tokens,
            max_running_requests=config.engine.max_running_requests,
            mem_fraction_static=config.engine.mem_fraction_static,
            context_length=config.engine.context_length,
            return_routed_experts=config.r3.enabled,
            random_seed=config.run.seed,
            log_file=self.ctx.run_dir / "logs" / f"{self.engine_id}.engine.log",
            extra_args=self._extra_args(),
            env=config.engine.env,
        )

    def _extra_args(self) -> tuple[str, ...]:
        options = self.ctx.config.engine
        pace = ("--token-s", str(options.fake_token_s)) if options.kind == "fake" else ()
        return (*pace, *options.extra_args)

    async def _start(self, writer: Writer) -> None:
        began_s = writer.clock.mono_s()
        options = self._options()
        self.process = self._make_process(launch_spec(self.ctx.config.engine.kind, options))
        await self.process.start(deadline_s=self.ctx.config.engine.start_deadline_s)
        self.control = await self._connect(EngineControl(options.url, name=self.engine_id))
        await self.control.probe()
        checksum = checksum_digest(await self.control.checksums())
        self.incarnation = fresh_id("inc")
        self.residency = engine_residency(self.ctx.config.offload.sizes_gib)
        fact = engine.EngineStarted(
            self.engine_id, self.incarnation, options.url, self.ctx.config.engine.kind, 0, checksum,
            writer.clock.mono_s() - began_s,
        )  # fmt: skip
        await writer.append(fact)
        self.was_up = True
        self.up.set()

    def _make_process(self, spec: LaunchSpec) -> EngineProcess:
        return EngineProcess(spec, name=self.engine_id)

    async def _connect(self, control: EngineControl) -> EngineControl:
        """Swap the client of the last incarnation for this one's."""
        await self._connections.aclose()
        return await self._connections.enter_async_context(control)

    async def _serve(self, stream: CommandStream, writer: Writer) -> None:
        async for delivery in stream:
            tries = 0
            while True:
                await self.up.wait()
                try:
                    async with stream.kept(delivery):
                        await self._handle(delivery, writer)
                    break
                except EngineUnavailable as error:
                    log.warning("%s: %s", delivery.event.envelope.type, error)
                    await asyncio.sleep(0.2)
                except EngineError as error:
                    tries += 1
                    log.error("%s: %s", delivery.event.envelope.type, error)
                    if tries >= COMMAND_TRIES and self.process is not None:
                        self.up.clear()
                        await self.process.stop()
                        tries = 0
            await stream.done(delivery)

    async def _handle(self, delivery: Delivery, writer: Writer) -> None:
        assert self.control is not None
        cause, body = delivery.event.id, delivery.event.body
        match body:
            case engine.PauseEngines():
                await writer.append(await self._pause(body, writer), cause=cause)
            case engine.ResumeEngines():
                await self.control.resume()
                await writer.append(engine.EngineResumed(body.pause, self.engine_id, body.version), cause=cause)
            case offload.Release() | offload.Onload():
                if body.incarnation == self.incarnation:  # another one holds everything, and is asked anew
                    await writer.append(await self._move(body), cause=cause)
            case _:
                detail = f"{delivery.event.envelope.type} is no command for an engine"
                await writer.append(run.AlarmRaised("refused", self.engine_id, detail), cause=cause)

    async def _move(self, body: offload.Release | offload.Onload) -> offload.Released | offload.Onloaded:
        assert self.control is not None
        before = self.residency.held()
        if isinstance(body, offload.Release):
            if not self.control.paused:  # it came up in the middle of a pause, empty
                await self.control.pause("retract")
            await self.control.release(body.tags)
            self.residency.released |= set(body.tags)
        else:
            await self.control.onload(body.tags)
            self.residency.released -= set(body.tags)
        after = self.residency.held()
        fact = offload.Released if isinstance(body, offload.Release) else offload.Onloaded
        return fact(
            body.pause, body.owner, body.incarnation, body.move, body.tags, before.device_bytes, after.device_bytes,
            before.host_bytes, after.host_bytes,
        )  # fmt: skip

    async def _pause(self, body: engine.PauseEngines, writer: Writer) -> engine.EnginePaused:
        """Requests were cut by id before; `retract` on the empty engine takes 3 ms, its own `abort` a second.

        No flush here: the load of new weights flushes, and an engine that keeps its weights may keep its cache.
        """
        assert self.control is not None
        began_s = writer.clock.mono_s()
        config = self.ctx.config
        how = realise(body.mode, partial=config.rollout.partial, r3=config.r3.enabled)
        await self.control.pause(how.engine_pause)
        took_s = writer.clock.mono_s() - began_s
        return engine.EnginePaused(body.pause, self.engine_id, body.mode, how.engine_pause, took_s)


def checksum_digest(checksums: dict[str, str]) -> str:
    """One digest of an engine's per-tensor checksums, in the order of their names."""
    return hashlib.sha256(msgspec.json.encode(sorted(checksums.items()))).hexdigest()
