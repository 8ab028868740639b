"""The trainer actor: re-executes what the last checkpoint lacks, then trains, syncs and saves as commands ask.

All torch work runs in one thread of its own, because torch keeps modes and generators per thread; the event loop stays
free to keep deliveries alive. TrainStep is acknowledged at the checkpoint that covers it: until then a crash
delivers it again, and a step that was planned is re-executed from the log before the actor says it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from actors import trainers
from actors.commands import CommandStream
from actors.device import dtype_of
from actors.engines.http import EngineControl
from actors.residency import trainer_residency
from segue.blobs import BlobStore
from segue.boot import RunContext
from segue.config import Config
from segue.errors import ConfigError, EngineError, SegueError, TrainerError
from segue.events import engine, offload, run, step, weights
from segue.ids import fresh_id
from segue.log import Delivery, EventLog, Writer
from segue.wire.sample import Sample, samples_from_bundle
from training import weight_sync
from training.protocol import StepResult, TrainerOptions, TrainerProtocol
from training.weight_sync.checksums import expected_checksums, prove_equal
from training.weight_sync.protocol import Manifest, SyncOptions, SyncReport, WeightCheckError
from training.weight_sync.source import manifest_of

log = logging.getLogger("actors.trainer")


@dataclass(slots=True)
class History:
    """What the log says about training: the last checkpoint and the steps planned after it."""

    lineage: int = 1
    checkpoint: step.CheckpointCommitted | None = None
    planned: dict[int, step.StepPlanned] = field(default_factory=dict)
    finished: dict[int, step.StepFinished] = field(default_factory=dict)
    """Of the surviving lineage."""
    highest_version: int = 0
    raised: run.LineageRaised | None = None
    """What this start of the trainer has appended."""


async def read_history(events: EventLog) -> History:
    history, position = History(), 0
    while batch := await events.read(position, limit=2048):
        position = batch[-1].position
        for event in batch:
            match event.body:
                case step.CheckpointCommitted() as body:
                    history.checkpoint = body
                case step.StepPlanned() as body:
                    history.planned[body.step] = body
                case step.StepFinished() as body:
                    history.finished[body.step] = body
                    history.highest_version = max(history.highest_version, body.version)
                case run.LineageRaised() as body:
                    history.lineage = body.lineage
                    history.highest_version = max(history.highest_version, body.first_version)
                    for number in body.abandoned_steps:
                        history.finished.pop(number, None)
    return history


def trainer_options(config: Config) -> TrainerOptions:
    """The trainer's options as the run's configuration says them."""
    options, recomputed = config.trainer, config.r3.recomputed
    if recomputed == "free_route":
        raise ConfigError('r3.recomputed = "free_route" is not built; use "mask_loss" or "replay"')
    clip = {"clip_low": options.clip_low, "clip_high": options.clip_high}
    return TrainerOptions(
        model_path=Path(config.model.path),
        dtype=dtype_of(config),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        epochs=options.epochs,
        minibatches=options.minibatches,
        loss=options.loss,
        loss_options=clip,
        advantage=options.advantage,
        micro_batch_tokens=options.micro_batch_tokens,
        replay_routes=config.r3.enabled,
        recomputed=recomputed,
        seed=config.run.seed,
    )


def as_torch(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as torch tensors, whatever the trainer keeps them in."""
    return ((name, torch.as_tensor(tensor)) for name, tensor in tensors)


class TrainerActor:
    """One trainer and its command stream `trainer`."""

    def __init__(self, ctx: RunContext) -> None:
        self.ctx = ctx
        self.blobs = BlobStore(self.ctx.blob_dir)
        self.incarnation = fresh_id("inc")
        self.step = 0
        self.version = 0
        self.manifest: Manifest = {}
        self.residency = trainer_residency(ctx.config.offload.sizes_gib)
        self.unsaved: dict[int, Delivery] = {}
        """Step -> its TrainStep, acknowledged when a checkpoint covers it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._trainer: TrainerProtocol | None = None

    @property
    def trainer(self) -> TrainerProtocol:
        assert self._trainer is not None
        return self._trainer

    async def _torch[T](self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def run(self, events: EventLog) -> None:
        try:
            async with await Writer.open(events, "trainer") as writer:
                await self._start(events, writer)
                stream = CommandStream(events, writer, "trainer", "trainer")
                async for delivery in stream:
                    await self._serve(stream, delivery, writer)
        except SegueError as error:
            log.error("trainer ends: %s", error)
            raise

    async def _start(self, events: EventLog, writer: Writer) -> None:
        began_s = writer.clock.mono_s()
        history = await read_history(events)
        kind, config = self.ctx.config.trainer.kind, self.ctx.config
        try:
            self._trainer = await self._torch(lambda: trainers.create(kind, trainer_options(config)))
            self.manifest = manifest_of(as_torch(self.trainer.named_tensors()))
            saved = history.checkpoint
            if saved is not None:
                await self._torch(lambda: self.trainer.load(self._checkpoint(saved.path)))
                self.step, self.version = saved.step, saved.version
        except SegueError as error:
            await writer.append(run.AlarmRaised("fatal", "trainer", str(error)))
            raise
        for number in sorted(n for n in history.planned if n > self.step):
            await self._execute(history.planned[number], writer, history)
        fact = step.TrainerReady(
            self.incarnation, kind, self.step, self.version, await self._torch(self.trainer.digest),
            writer.clock.mono_s() - began_s, saved.path if saved is not None else "",
        )  # fmt: skip
        await writer.append(fact)

    def _checkpoint(self, name: str) -> Path:
        return self.ctx.run_dir / "checkpoints" / name

    async def _serve(self, stream: CommandStream, delivery: Delivery, writer: Writer) -> None:
        body = delivery.event.body
        async with stream.kept(delivery):
            match body:
                case step.TrainStep():
                    await self._train(stream, delivery, body, writer)
                    return
                case weights.SyncWeights():
                    await self._sync(delivery, body, writer)
                case step.SaveCheckpoint():
                    await self._save(stream, body, delivery, writer)
                case offload.Release() | offload.Onload():
                    if body.incarnation == self.incarnation:  # another one holds everything, and is asked anew
                        await writer.append(self._move(body), cause=delivery.event.id)
                case _:
                    detail = f"{delivery.event.envelope.type} is no command for the trainer"
                    await writer.append(run.AlarmRaised("refused", "trainer", detail), cause=delivery.event.id)
        await stream.done(delivery)

    def _move(self, body: offload.Release | offload.Onload) -> offload.Released | offload.Onloaded:
        """A state change: on a CPU there is no device to leave."""
        before = self.residency.held()
        releases = isinstance(body, offload.Release)
        self.residency.released = self.residency.released.symmetric_difference(
            tag for tag in body.tags if (tag in self.residency.released) != releases
        )
        after = self.residency.held()
        fact = offload.Released if releases else offload.Onloaded
        return fact(
            body.pause, body.owner, body.incarnation, body.move, body.tags, before.device_bytes, after.device_bytes,
            before.host_bytes, after.host_bytes,
        )  # fmt: skip

    async def _train(self, stream: CommandStream, delivery: Delivery, body: step.TrainStep, writer: Writer) -> None:
        if body.step > self.step:
            if self.residency.released:
                raise TrainerError(
                    f"step {body.step} was asked for while {sorted(self.residency.released)} are released"
                )
            plan = step.StepPlanned(body.lineage, body.step, body.sample_ids, body.frame_digests, body.seed)
            try:
                await writer.append(plan, cause=delivery.event.id)
                await self._execute(plan, writer)
            except (SegueError, ArithmeticError, RuntimeError) as error:
                log.exception("step %d failed", body.step)
                if await stream.give_up(delivery, f"step {body.step}: {error}"):
                    return
                raise
        self.unsaved[body.step] = delivery

    async def _execute(self, plan: step.StepPlanned, writer: Writer, history: History | None = None) -> None:
        """Train one planned step. `history`: what the log says of it already, if this is a re-execution."""
        started_wall_s, began_s = time.time(), time.monotonic()
        samples = [sample for digest in plan.frame_digests for sample in await self._samples(digest)]
        before = self.version

        def work() -> StepResult:
            return self.trainer.step(samples, step=plan.step, version=before, seed=plan.seed)

        result = await self._torch(work)
        if history is not None:
            plan, result = await self._compare(plan, result, history, writer)
        self.step, self.version = result.step, result.version
        fact = step.StepFinished(
            plan.lineage, result.step, result.version, result.digest, result.metrics, started_wall_s,
            time.monotonic() - began_s,
        )  # fmt: skip
        await writer.append(fact)

    async def _compare(
        self, plan: step.StepPlanned, result: StepResult, history: History, writer: Writer
    ) -> tuple[step.StepPlanned, StepResult]:
        """A re-executed step that gave other weights than recorded (an accelerator may) starts a new lineage: what was
        recorded from here on is abandoned, and versions go on above every one that was ever published."""
        recorded = history.finished.get(plan.step)
        if history.raised is None and recorded is not None and recorded.digest != result.digest:
            abandoned = tuple(sorted(n for n in history.finished if n >= plan.step))
            first = max(history.highest_version, result.version) + 1
            history.raised = run.LineageRaised(history.lineage + 1, abandoned, first)
            log.warning("step %d gave other weights than recorded: lineage %d", plan.step, history.lineage + 1)
            await writer.append(history.raised)
            await self._torch(lambda: self.trainer.renumber(first))
            result = dataclasses.replace(result, version=first)
        lineage = history.lineage if history.raised is None else history.raised.lineage
        if lineage != plan.lineage:
            plan = msgspec.structs.replace(plan, lineage=lineage)
            await writer.append(plan)
        return plan, result

    async def _samples(self, digest: str) -> list[Sample]:
        """Those of one rollout: one for each leaf that trains."""
        return samples_from_bundle(await asyncio.to_thread(self.blobs.get, digest), with_mask=True)

    async def _sync(self, delivery: Delivery, body: weights.SyncWeights, writer: Writer) -> None:
        """Load the current weights into all engines named; a failure half way tears every one of them."""
        cause, names = delivery.event.id, tuple(e.engine_id for e in body.engines)
        await writer.append(weights.SyncBegun(body.sync, body.version, names), cause=cause)
        began_s = time.monotonic()
        try:
            if body.version != self.version:
                raise TrainerError(f"asked for version {body.version}, the trainer holds {self.version}")
            async with asyncio.timeout(self.ctx.config.weights.deadline_s):
                report = await self._load_and_prove(body)
        except (EngineError, TrainerError, TimeoutError) as error:
            torn = () if isinstance(error, WeightCheckError) or body.version != self.version else names
            reason = str(error) or f"weights.deadline_s = {self.ctx.config.weights.deadline_s:g} passed"
            log.error("sync %d failed: %s", body.sync, reason)
            for name in torn:
                await writer.append(engine.EngineTorn(name, body.version, reason), cause=cause)
            await writer.append(weights.SyncFailed(body.sync, body.version, reason, torn), cause=cause)
            return
        fact = weights.WeightsSynced(
            body.sync, body.version, report.digest, names, report.sent_bytes, time.monotonic() - began_s, self._proves
        )
        await writer.append(fact, cause=cause)

    @property
    def _proves(self) -> bool:
        """Engines on accelerators hash by another rule and may re-lay weights: there nothing can be compared yet. The
        fake trainer's one tensor is no model's, so there is nothing to compare it with."""
        config = self.ctx.config
        return config.weights.prove and config.trainer.kind != "fake" and not torch.cuda.is_available()

    async def _load_and_prove(self, body: weights.SyncWeights) -> SyncReport:
        config = self.ctx.config
        options = SyncOptions(
            bucket_bytes=config.weights.bucket_bytes,
            folder=self.ctx.run_dir / "weights",
            source=Path(config.model.path),
            load_timeout_s=config.weights.deadline_s,
        )
        tensors = list(as_torch(self.trainer.named_tensors()))
        async with contextlib.AsyncExitStack() as stack:
            receivers = [await stack.enter_async_context(EngineControl(e.url, name=e.engine_id)) for e in body.engines]
            report = await weight_sync.create(body.transport, options).sync(
                tensors, tuple(receivers), version=body.version, manifest=self.manifest, flush_cache=body.flush_cache
            )
            if self._proves:
                expected = expected_checksums(tensors)
                for receiver in receivers:
                    prove_equal(expected, await receiver.checksums())
        return report

    async def _save(self, stream: CommandStream, body: step.SaveCheckpoint, delivery: Delivery, writer: Writer) -> None:
        began_s = time.monotonic()
        name = f"step-{self.step:06d}"
        folder = self._checkpoint(name)
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            await self._torch(lambda: self.trainer.save(folder, step=self.step, cursor=str(delivery.event.position)))
        digest = await self._torch(self.trainer.digest)
        fact = step.CheckpointCommitted(body.lineage, self.step, self.version, digest, name, time.monotonic() - began_s)
        await writer.append(fact, cause=delivery.event.id)
        for number in [n for n in self.unsaved if n <= self.step]:
            await stream.done(self.unsaved.pop(number))
        await asyncio.to_thread(self._prune)

    def _prune(self) -> None:
        """Keep the newest checkpoints; the one just committed is among them."""
        kept = sorted(self._checkpoint("").glob("step-*"))
        for folder in kept[: -self.ctx.config.checkpoint.keep]:
            shutil.rmtree(folder, ignore_errors=True)
