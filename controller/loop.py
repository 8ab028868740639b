"""The controller's shell: follows the log, asks `decide`, appends what it answers.

It keeps nothing of its own: at start it folds the whole log. `decide` is asked again only when everything appended so
far has been read back, so that it never decides on a state older than its own decisions.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
from collections import deque
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from controller.decide import DECIDE_VERSION, Issue, decide
from segue import boot
from segue.blobs import BlobStore
from segue.blobs.retention import Retention, collect
from segue.boot import RunContext
from segue.errors import BlobError, FencedError
from segue.events import run
from segue.events.codec import Recorded
from segue.events.step import EvaluationFinished, StepFinished
from segue.ids import EventId
from segue.log import EventLog, Writer, open_log
from segue.state import RunState

log = logging.getLogger("controller")
READ_WAIT_S = 5.0
READ_LIMIT = 1024
COLLECT_EVERY_S = 300.0
SLOW_FACTOR = 5.0
"""A step that takes this many times the usual is worth an alarm."""
GATHER_S = 0.005
"""Pause between two reads: a decision may wait this long, and reading event by event costs more than deciding."""


class Pace:
    """How long a step usually takes, from finish to finish, and whether this one takes much longer."""

    def __init__(self) -> None:
        self._finished_wall_s: deque[float] = deque(maxlen=9)
        self._told = False

    def apply(self, event: Recorded) -> None:
        match event.body:
            case StepFinished():
                self._finished_wall_s.append(event.envelope.wall_s)
                self._told = False
            case run.RunResumed() | EvaluationFinished():  # the time before belongs to something else
                self._finished_wall_s.clear()

    @property
    def usual_s(self) -> float:
        """Median over the last steps, 0 while there are too few."""
        times = list(self._finished_wall_s)
        return median(b - a for a, b in pairwise(times)) if len(times) > 3 else 0.0

    def late_s(self, now_wall_s: float, at_least_s: float) -> float:
        """Seconds since the last step, once, if that is SLOW_FACTOR times the usual and `at_least_s`; else 0."""
        usual_s = self.usual_s
        if self._told or not usual_s:
            return 0.0
        since_s = now_wall_s - self._finished_wall_s[-1]
        self._told = since_s > max(at_least_s, SLOW_FACTOR * usual_s)
        return since_s if self._told else 0.0


async def main(ctx: RunContext) -> None:
    """Run until RunStopped stands in the log."""
    events = await open_log(ctx)
    try:
        async with await Writer.open(events, "controller") as writer:
            await Loop(ctx, events, writer).run()
    finally:
        await events.close()


class Loop:
    def __init__(self, ctx: RunContext, events: EventLog, writer: Writer) -> None:
        self.ctx, self.events, self.writer = ctx, events, writer
        self.state = RunState()
        self.last: EventId | None = None
        self.barrier = 0
        self.quiet_since_s = writer.clock.mono_s()
        self.alarmed = False
        self.pace = Pace()
        self.retention = Retention()
        self.blobs = BlobStore(ctx.blob_dir) if ctx.config.retention.blobs_h else None
        self.collected_s = writer.clock.mono_s()

    async def run(self) -> None:
        tail = await self.events.tail()
        while self.state.position < tail:
            await self._read(0.0)
        await self._announce()
        while self.state.position < self.barrier:  # an earlier RunStopped is over when RunResumed was read
            await self._read(READ_WAIT_S)
        while not self.state.stopped:
            grown = await self._read(READ_WAIT_S)
            if self.state.position < self.barrier:
                continue
            await self._act()
            await self._watch_for_stall(grown)
            await self._watch_the_pace()
            await self._collect()
            await self.writer.clock.sleep(GATHER_S)
        log.info("run %s: %s", self.state.run_id, self.state.stopped)

    async def _read(self, wait_s: float) -> bool:
        batch = await self.events.read(self.state.position, limit=READ_LIMIT, wait_s=wait_s)
        for event in batch:
            self.state.apply(event)
            self.pace.apply(event)
            if self.blobs is not None:
                self.retention.apply(event)
            self.last = event.id
        return bool(batch)

    async def _announce(self) -> None:
        start_id = self.ctx.endpoints.start_id
        config = msgspec.json.encode(self.ctx.config).decode()
        digest = hashlib.sha256(config.encode()).hexdigest()
        engines = tuple(f"engine-{i}" for i in range(self.ctx.config.engine.count))
        if not self.state.run_id:
            servers = self.ctx.config.session_server.count
            body: run.RunStarted | run.RunResumed = run.RunStarted(
                self.ctx.run_id, config, digest, DECIDE_VERSION, 1, servers, engines, start_id
            )
        else:
            state, whole = self.state, start_id != self.state.start_id
            body = run.RunResumed(
                self.ctx.run_id, config, digest, DECIDE_VERSION, state.lineage, state.restarts + 1, whole, start_id
            )
        self.barrier = (await self.writer.append(body)).position

    async def _act(self) -> None:
        pending = []
        for decision in decide(self.state):
            if isinstance(decision, Issue):
                log.info("ask %s of %s", decision.command, ", ".join(decision.targets))
                pending.append(self.writer.submit(decision.command, cause=self.last, targets=decision.targets))
            else:
                log.info("record %s", decision.fact)
                pending.append(self.writer.submit(decision.fact, cause=self.last))
        for done in pending:
            self.barrier = max(self.barrier, (await done).position)

    async def _watch_the_pace(self) -> None:
        late_s = self.pace.late_s(self.writer.clock.wall_s(), self.ctx.config.run.stall_s)
        if late_s:
            detail = (
                f"no step for {late_s:.0f} s, {late_s / self.pace.usual_s:.0f} times the usual; "
                "`segue status --why` shows who waits for whom"
            )
            await self.writer.append(run.AlarmRaised("slow", "run", detail))

    async def _collect(self) -> None:
        """Remove blobs that nobody needs any more, now and then."""
        now = self.writer.clock.mono_s()
        if self.blobs is None or now - self.collected_s < COLLECT_EVERY_S:
            return
        self.collected_s = now
        keep_s, wall_s = self.ctx.config.retention.blobs_h * 3600.0, self.writer.clock.wall_s()
        try:
            freed = await asyncio.to_thread(collect, self.retention, self.blobs, wall_s, keep_s)
        except BlobError as error:
            log.warning("%s", error)
        else:
            log.info("%d bytes of blobs removed that nobody needed for %g h", freed, keep_s / 3600.0)

    async def _watch_for_stall(self, grown: bool) -> None:
        now = self.writer.clock.mono_s()
        if grown:
            self.quiet_since_s, self.alarmed = now, False
        elif not self.alarmed and now - self.quiet_since_s > self.ctx.config.run.stall_s:
            self.alarmed = True
            detail = f"nothing was appended for {now - self.quiet_since_s:.0f} s; `segue status` shows who waits"
            await self.writer.append(run.AlarmRaised("stall", "run", detail))


def cli(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m controller", description="The controller of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args(argv)

    async def start(ctx: RunContext) -> None:
        try:
            await main(ctx)
        except FencedError:
            log.error("another controller has taken over this run; stopping")
            raise

    return boot.run_service("controller", options.run_dir, start)
