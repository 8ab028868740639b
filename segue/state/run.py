"""The state of a run as the controller sees it, folded from its log.

A fold owns its state and mutates it. A command in the log counts as the fact that it was asked for: `asked` holds the
logical keys, so that nothing is asked for twice, also after a restart. Everything else follows from facts alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from segue.config.schema import Config
from segue.events import engine, handoff, offload, run, sample, step, turn, weights, work
from segue.events.base import Body
from segue.events.codec import Recorded

GroupKey = tuple[str, int]
"""(purpose, group number)"""


@dataclass(slots=True)
class EngineState:
    engine_id: str
    incarnation: str
    url: str
    version: int
    up: bool = True
    torn: bool = False
    paused: int = 0
    """Number of the pause that holds it, 0 when it runs."""


@dataclass(slots=True)
class GroupState:
    purpose: str
    group: int
    samples: dict[int, sample.SampleReady] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    """member -> why it has no sample"""
    settled: bool = False
    """GroupCompleted or GroupDropped stands in the log."""
    completed_at: int = 0
    """Position of GroupCompleted, 0 if it is open or was dropped."""

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled any token of its samples; there must be one."""
        return min(member.oldest_version for member in self.samples.values())


@dataclass(slots=True)
class TrainerState:
    incarnation: str
    step: int
    version: int
    digest: str


@dataclass(slots=True)
class RunState:
    """Mutable; apply events in log order. `position` is that of the last one applied."""

    position: int = 0
    config: Config = field(default_factory=Config)
    run_id: str = ""
    lineage: int = 1
    decide_version: int = 0
    restarts: int = 0
    start_id: str = ""
    session_servers: int = 1
    engine_ids: tuple[str, ...] = ()
    stopped: str = ""
    stop_asked: str = ""
    fatal: str = ""
    """Why the run cannot go on, if it cannot."""
    services: dict[str, str] = field(default_factory=dict)
    engines: dict[str, EngineState] = field(default_factory=dict)
    trainer: TrainerState | None = None
    groups: dict[GroupKey, GroupState] = field(default_factory=dict)
    unsettled: dict[GroupKey, GroupState] = field(default_factory=dict)
    trainable: dict[int, GroupState] = field(default_factory=dict)
    """Complete training groups that belong to no step yet, in order of completion."""
    dropped: int = 0
    """Training groups dropped so far."""
    settled_train: int = 0
    """Training groups completed or dropped so far."""
    open_requests: dict[str, str] = field(default_factory=dict)
    """request id -> session server that sent it."""
    asked: set[str] = field(default_factory=set)
    admission: work.OpenAdmission | None = None
    admission_opened: dict[str, int] = field(default_factory=dict)
    """service -> highest admission it has opened."""
    admitted_end: dict[str, int] = field(default_factory=dict)
    """purpose -> groups below this number were admitted."""
    pause_closed: dict[str, int] = field(default_factory=dict)
    """service -> highest pause it has closed admission for."""
    pause_done: dict[str, int] = field(default_factory=dict)
    """engine -> highest pause it has been paused for."""
    resumed: dict[str, int] = field(default_factory=dict)
    """engine -> highest pause it has been resumed from."""
    planned: dict[int, tuple[str, ...]] = field(default_factory=dict)
    finished: dict[int, step.StepFinished] = field(default_factory=dict)
    checkpoints: dict[int, step.CheckpointCommitted] = field(default_factory=dict)
    evaluations: dict[int, step.EvaluationFinished] = field(default_factory=dict)
    released: dict[str, frozenset[str]] = field(default_factory=dict)
    """owner (an engine or "trainer") -> tags that are off its device now."""
    moves: dict[str, int] = field(default_factory=dict)
    """owner -> releases and onloads of its incarnation so far."""
    handoff_planned: int = 0
    """Pause of the last HandoffPlanned."""
    handoff_finished: int = 0
    syncs_settled: int = 0
    sync_failures_in_row: int = 0

    @property
    def step(self) -> int:
        """The last finished step, 0 before the first."""
        return max(self.finished, default=0)

    @property
    def version(self) -> int:
        """Of the trainer's weights, 0 before it is there."""
        return self.trainer.version if self.trainer is not None else 0

    def up_engines(self) -> list[EngineState]:
        return [e for _, e in sorted(self.engines.items()) if e.up]

    def incarnation_of(self, owner: str) -> str:
        """Of an engine or "trainer", as it is now; "" before it was there."""
        if owner == "trainer":
            return self.trainer.incarnation if self.trainer is not None else ""
        return self.engines[owner].incarnation if owner in self.engines else ""

    def admission_services(self) -> list[str]:
        """The services that open and close admission."""
        return [*(f"session-{i}" for i in range(self.session_servers)), "router"]

    def group(self, purpose: str, number: int) -> GroupState:
        known = self.groups.get((purpose, number))
        if known is None:
            known = self.groups[purpose, number] = self.unsettled[purpose, number] = GroupState(purpose, number)
        return known

    def apply(self, event: Recorded) -> None:
        self.position = event.position
        body = event.body
        if body is None:
            return
        if body.SPEC.kind == "command":
            self.asked.add(body.logical_key() or "")
        handler = _HANDLERS.get(type(body))
        if handler is not None:
            handler(self, body, event)


Handler = Callable[[RunState, Body, Recorded], None]
_HANDLERS: dict[type[Body], Handler] = {}


def _on[B: Body](kind: type[B]) -> Callable[[Callable[[RunState, B, Recorded], None]], None]:
    def register(function: Callable[[RunState, B, Recorded], None]) -> None:
        def call(state: RunState, body: Body, event: Recorded) -> None:
            assert isinstance(body, kind)
            function(state, body, event)

        _HANDLERS[kind] = call

    return register


@_on(run.RunStarted)
def _(s: RunState, b: run.RunStarted, e: Recorded) -> None:
    s.run_id, s.lineage, s.decide_version = b.run_id, b.lineage, b.decide_version
    s.config = msgspec.json.decode(b.config, type=Config)
    s.session_servers, s.engine_ids, s.start_id = b.session_servers, b.engines, b.start_id


@_on(run.RunResumed)
def _(s: RunState, b: run.RunResumed, e: Recorded) -> None:
    s.config = msgspec.json.decode(b.config, type=Config)
    s.restarts, s.decide_version = b.restart, b.decide_version
    s.stopped = s.stop_asked = s.fatal = ""
    s.start_id = b.start_id
    if b.whole:
        s.services.clear()
        s.trainer = None
        s.engines.clear()


@_on(run.StopRun)
def _(s: RunState, b: run.StopRun, e: Recorded) -> None:
    if b.restart == s.restarts:
        s.stop_asked = b.reason


@_on(run.RunStopped)
def _(s: RunState, b: run.RunStopped, e: Recorded) -> None:
    s.stopped = b.reason


@_on(run.AlarmRaised)
def _(s: RunState, b: run.AlarmRaised, e: Recorded) -> None:
    if b.kind == "fatal":
        s.fatal = s.fatal or f"{b.subject}: {b.detail}"


@_on(run.CommandDeadLettered)
def _(s: RunState, b: run.CommandDeadLettered, e: Recorded) -> None:
    s.fatal = s.fatal or f"{b.target} gave up on command {b.command_position}: {b.reason}"


@_on(run.LineageRaised)
def _(s: RunState, b: run.LineageRaised, e: Recorded) -> None:
    s.lineage = b.lineage
    for number in b.abandoned_steps:
        s.finished.pop(number, None)
        s.checkpoints.pop(number, None)


@_on(run.ServiceReady)
def _(s: RunState, b: run.ServiceReady, e: Recorded) -> None:
    s.services[b.service] = b.url


@_on(work.OpenAdmission)
def _(s: RunState, b: work.OpenAdmission, e: Recorded) -> None:
    s.admission = b
    s.admitted_end[b.purpose] = max(s.admitted_end.get(b.purpose, 0), b.end_group)


@_on(work.AdmissionOpened)
def _(s: RunState, b: work.AdmissionOpened, e: Recorded) -> None:
    s.admission_opened[b.service] = max(s.admission_opened.get(b.service, 0), b.admission)


@_on(work.AdmissionClosed)
def _(s: RunState, b: work.AdmissionClosed, e: Recorded) -> None:
    s.pause_closed[b.service] = max(s.pause_closed.get(b.service, 0), b.pause)


@_on(work.GroupCompleted)
def _(s: RunState, b: work.GroupCompleted, e: Recorded) -> None:
    group = s.group(b.purpose, b.group)
    group.settled, group.completed_at = True, e.position
    s.unsettled.pop((b.purpose, b.group), None)
    if b.purpose == "train":
        s.trainable[b.group] = group
        s.settled_train += 1


@_on(work.GroupDropped)
def _(s: RunState, b: work.GroupDropped, e: Recorded) -> None:
    group = s.group(b.purpose, b.group)
    group.settled = True
    s.unsettled.pop((b.purpose, b.group), None)
    if b.purpose == "train":
        s.dropped += 1
        # A complete group that grew stale was counted when it was completed.
        s.settled_train += s.trainable.pop(b.group, None) is None


@_on(sample.SampleReady)
def _(s: RunState, b: sample.SampleReady, e: Recorded) -> None:
    if b.group >= 0:
        s.group(b.purpose, b.group).samples[b.member] = b


@_on(sample.SampleRejected)
def _(s: RunState, b: sample.SampleRejected, e: Recorded) -> None:
    if b.group >= 0:
        s.group(b.purpose, b.group).failed[b.member] = b.reason or "rejected"


@_on(turn.TurnStarted)
def _(s: RunState, b: turn.TurnStarted, e: Recorded) -> None:
    s.open_requests[b.request_id] = e.id.producer


@_on(turn.TurnResumed)
def _(s: RunState, b: turn.TurnResumed, e: Recorded) -> None:
    s.open_requests[b.request_id] = e.id.producer


def _request_ended(s: RunState, request_id: str) -> None:
    s.open_requests.pop(request_id, None)


@_on(turn.TurnCommitted)
def _(s: RunState, b: turn.TurnCommitted, e: Recorded) -> None:
    _request_ended(s, b.request_id)


@_on(turn.TurnInterrupted)
def _(s: RunState, b: turn.TurnInterrupted, e: Recorded) -> None:
    _request_ended(s, b.request_id)


@_on(turn.TurnDiscarded)
def _(s: RunState, b: turn.TurnDiscarded, e: Recorded) -> None:
    _request_ended(s, b.request_id)


@_on(turn.TurnFailed)
def _(s: RunState, b: turn.TurnFailed, e: Recorded) -> None:
    _request_ended(s, b.request_id)


@_on(engine.EngineStarted)
def _(s: RunState, b: engine.EngineStarted, e: Recorded) -> None:
    s.engines[b.engine_id] = EngineState(b.engine_id, b.incarnation, b.url, b.version)
    s.released.pop(b.engine_id, None)
    s.moves.pop(b.engine_id, None)


@_on(engine.EngineLost)
def _(s: RunState, b: engine.EngineLost, e: Recorded) -> None:
    known = s.engines.get(b.engine_id)
    if known is not None and known.incarnation == b.incarnation:
        known.up, known.paused = False, 0


@_on(engine.EngineTorn)
def _(s: RunState, b: engine.EngineTorn, e: Recorded) -> None:
    if b.engine_id in s.engines:
        s.engines[b.engine_id].torn = True


@_on(engine.EnginePaused)
def _(s: RunState, b: engine.EnginePaused, e: Recorded) -> None:
    s.pause_done[b.engine_id] = max(s.pause_done.get(b.engine_id, 0), b.pause)
    if b.engine_id in s.engines:
        s.engines[b.engine_id].paused = b.pause


@_on(engine.EngineResumed)
def _(s: RunState, b: engine.EngineResumed, e: Recorded) -> None:
    s.resumed[b.engine_id] = max(s.resumed.get(b.engine_id, 0), b.pause)
    if b.engine_id in s.engines:
        s.engines[b.engine_id].paused = 0


@_on(weights.WeightsSynced)
def _(s: RunState, b: weights.WeightsSynced, e: Recorded) -> None:
    s.syncs_settled, s.sync_failures_in_row = max(s.syncs_settled, b.sync), 0
    for engine_id in b.engines:
        if engine_id in s.engines:
            s.engines[engine_id].version, s.engines[engine_id].torn = b.version, False


@_on(weights.SyncFailed)
def _(s: RunState, b: weights.SyncFailed, e: Recorded) -> None:
    s.syncs_settled = max(s.syncs_settled, b.sync)
    s.sync_failures_in_row += 1
    for engine_id in b.torn:
        if engine_id in s.engines:
            s.engines[engine_id].torn = True


@_on(step.TrainerReady)
def _(s: RunState, b: step.TrainerReady, e: Recorded) -> None:
    s.trainer = TrainerState(b.incarnation, b.step, b.version, b.digest)
    s.released.pop("trainer", None)
    s.moves.pop("trainer", None)


@_on(step.TrainStep)
def _(s: RunState, b: step.TrainStep, e: Recorded) -> None:
    s.planned[b.step] = b.sample_ids
    wanted = set(b.sample_ids)
    for number, group in list(s.trainable.items()):
        if any(item.sample_id in wanted for item in group.samples.values()):
            del s.trainable[number]


@_on(step.StepFinished)
def _(s: RunState, b: step.StepFinished, e: Recorded) -> None:
    s.finished[b.step] = b
    if s.trainer is not None:
        s.trainer.step, s.trainer.version, s.trainer.digest = b.step, b.version, b.digest


@_on(step.CheckpointCommitted)
def _(s: RunState, b: step.CheckpointCommitted, e: Recorded) -> None:
    s.checkpoints[b.step] = b


@_on(step.EvaluationFinished)
def _(s: RunState, b: step.EvaluationFinished, e: Recorded) -> None:
    s.evaluations[b.evaluation] = b


@_on(offload.Released)
def _(s: RunState, b: offload.Released, e: Recorded) -> None:
    if b.incarnation == s.incarnation_of(b.owner):
        s.released[b.owner] = s.released.get(b.owner, frozenset()) | frozenset(b.tags)
        s.moves[b.owner] = b.move


@_on(offload.Onloaded)
def _(s: RunState, b: offload.Onloaded, e: Recorded) -> None:
    if b.incarnation == s.incarnation_of(b.owner):
        s.released[b.owner] = s.released.get(b.owner, frozenset()) - frozenset(b.tags)
        s.moves[b.owner] = b.move


@_on(handoff.HandoffPlanned)
def _(s: RunState, b: handoff.HandoffPlanned, e: Recorded) -> None:
    s.handoff_planned = b.pause


@_on(handoff.HandoffFinished)
def _(s: RunState, b: handoff.HandoffFinished, e: Recorded) -> None:
    s.handoff_finished = b.pause
