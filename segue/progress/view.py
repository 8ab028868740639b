"""What a person wants to know of a run, folded from its log.

Invariants: pure and in log order, so a replayed log gives the same numbers; bounded by what is open now and by the
number of steps, not by the number of turns; abandoned steps (LineageRaised) leave all counts but tokens and turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from segue.events import engine, run, sample, session, step, turn, weights, work
from segue.events.base import Body
from segue.events.codec import Recorded

RATE_WINDOW_S = 10.0
NOTES = 5


class _RunOptions(msgspec.Struct, frozen=True):
    steps: int = 0


class _Part(msgspec.Struct, frozen=True):
    kind: str = ""


class _Environment(msgspec.Struct, frozen=True):
    baselines: dict[str, float] = {}


class RunConfig(msgspec.Struct, frozen=True):
    """The few options that are shown, read leniently: a recorded configuration may be older than this build."""

    run: _RunOptions = _RunOptions()
    engine: _Part = _Part()
    trainer: _Part = _Part()
    environment: _Environment = _Environment()


@dataclass(slots=True)
class EngineView:
    """`state`: up | paused | torn | lost."""

    state: str
    version: int


@dataclass(frozen=True, slots=True)
class StepView:
    """A finished step. `reward`: mean over its rollouts, None if the trainer did not say."""

    step: int
    reward: float | None
    samples: int
    started_wall_s: float
    finished_wall_s: float
    metrics: dict[str, float]


@dataclass(slots=True)
class RunView:
    """Mutable; apply events in log order. Times are wall times of events, in seconds."""

    run_id: str = ""
    config: RunConfig = field(default_factory=RunConfig)
    phase: str = "starting"
    stopped: str = ""
    """Reason of RunStopped, "" while the run goes on."""
    restarts_of_run: int = 0
    """How often the run was resumed, as its last RunResumed says."""
    first_wall_s: float = 0.0
    last_wall_s: float = 0.0
    rollout_wall_s: float = 0.0
    """First AdmissionOpened, 0 before it."""
    steps: dict[int, StepView] = field(default_factory=dict)
    evaluations: dict[int, step.EvaluationFinished] = field(default_factory=dict)
    weight_version: int = 0
    engines: dict[str, EngineView] = field(default_factory=dict)
    open_sessions: set[str] = field(default_factory=set)
    running: dict[str, str] = field(default_factory=dict)
    """Request id -> engine, of the requests that engines work on now."""
    held: set[tuple[str, str]] = field(default_factory=set)
    """(session, turn) of turns that were cut and wait to be carried on."""
    partial: set[tuple[str, str]] = field(default_factory=set)
    """(session, turn) of open turns that hold tokens from before a cut."""
    partial_turns: int = 0
    """Committed turns that were cut at least once and kept tokens."""
    turns: int = 0
    tokens_generated: int = 0
    """Output tokens of committed turns."""
    restarts: int = 0
    """Processes of the run that were started again."""
    alarms: int = 0
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES))
    """The last alarms and restarts, for people."""
    _planned: dict[int, int] = field(default_factory=dict)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def step(self) -> int:
        """The last finished step, 0 before the first."""
        return max(self.steps, default=0)

    @property
    def reward(self) -> float | None:
        """Mean reward of the last finished step."""
        return self.steps[self.step].reward if self.steps else None

    @property
    def rows_replayed(self) -> int:
        return int(self.total("rows_replayed"))

    @property
    def samples_trained(self) -> int:
        return sum(done.samples for done in self.steps.values())

    @property
    def tokens_per_s(self) -> float:
        """Committed output tokens over the last RATE_WINDOW_S up to the last event (less while a run is younger)."""
        since = max(self.last_wall_s - RATE_WINDOW_S, self.rollout_wall_s)
        if self.last_wall_s <= since:
            return 0.0
        return sum(tokens for wall_s, tokens in self._recent if wall_s > since) / (self.last_wall_s - since)

    def total(self, metric: str) -> float:
        """A metric summed over the steps."""
        return sum(done.metrics.get(metric, 0.0) for done in self.steps.values())

    def apply(self, event: Recorded) -> None:
        wall_s = event.envelope.wall_s
        self.first_wall_s = self.first_wall_s or wall_s
        self.last_wall_s = max(self.last_wall_s, wall_s)
        while self._recent and self._recent[0][0] < self.last_wall_s - RATE_WINDOW_S:
            self._recent.popleft()
        if event.body is not None:
            self._apply_run(event.body)
            self._apply_work(event.body, wall_s)
            self._apply_engines(event.body)
            self._apply_turns(event.body, wall_s)

    def _apply_run(self, body: Body) -> None:
        match body:
            case run.RunStarted() | run.RunResumed():
                self.run_id, self.config = body.run_id, msgspec.json.decode(body.config, type=RunConfig)
                self.stopped = ""
                if isinstance(body, run.RunResumed):
                    self.restarts_of_run = body.restart
                    if body.whole:
                        self.phase = "starting"
                        self.running.clear()
                        self.engines.clear()
            case run.RunStopped():
                self.stopped = self.phase = body.reason
            case run.AlarmRaised():
                self.alarms += 1
                self.notes.append(f"alarm: {body.kind} {body.subject}: {body.detail}")
            case run.CommandDeadLettered():
                self.notes.append(f"{body.target} gave up on command {body.command_position}: {body.reason}")
            case run.ProcessRestarted():
                self.restarts += 1
                self.notes.append(
                    f"{body.process} was started again (exit code {body.exit_code}, restart {body.count})"
                )
            case run.LineageRaised():
                for abandoned in body.abandoned_steps:
                    self.steps.pop(abandoned, None)
                steps = ", ".join(map(str, body.abandoned_steps))
                self.notes.append(f"steps {steps} were abandoned: their weights could not be made again")

    def _apply_work(self, body: Body, wall_s: float) -> None:
        match body:
            case work.OpenAdmission():
                self.phase = "rolling out" if body.purpose == "train" else "evaluating"
            case work.AdmissionOpened():
                self.rollout_wall_s = self.rollout_wall_s or wall_s
            case work.CloseAdmission():
                self.phase = "pausing"
            case step.StepPlanned():
                self.phase = "training"
                self._planned[body.step] = len(body.sample_ids)
            case step.StepFinished():
                self.phase = "trained"
                self.steps[body.step] = StepView(
                    step=body.step,
                    reward=body.metrics.get("reward_mean"),
                    samples=self._planned.pop(body.step, 0),
                    started_wall_s=body.started_wall_s,
                    finished_wall_s=wall_s,
                    metrics=body.metrics,
                )
            case step.EvaluationFinished():
                self.evaluations[body.evaluation] = body
            case sample.SampleRejected():
                self.notes.append(f"rollout {body.rollout_id} gave no sample: {body.reason}")

    def _apply_engines(self, body: Body) -> None:
        match body:
            case weights.SyncBegun():
                self.phase = "syncing weights"
            case weights.WeightsSynced():
                self.weight_version = max(self.weight_version, body.version)
                for name in self.engines.keys() & set(body.engines):
                    self.engines[name].version = body.version
            case engine.EngineStarted():
                self.engines[body.engine_id] = EngineView("up", body.version)
            case engine.EnginePaused():
                self._engine(body.engine_id, "paused")
            case engine.EngineResumed() | engine.EngineReadmitted():
                self._engine(body.engine_id, "up")
            case engine.EngineTorn():
                self._engine(body.engine_id, "torn")
            case engine.EngineLost():
                self._engine(body.engine_id, "lost")
                for request_id in [r for r, where in self.running.items() if where == body.engine_id]:
                    del self.running[request_id]

    def _apply_turns(self, body: Body, wall_s: float) -> None:
        match body:
            case session.SessionOpened():
                self.open_sessions.add(body.session_id)
            case session.SessionFinished() | session.SessionAbandoned() | session.SessionExpired():
                self.open_sessions.discard(body.session_id)
                for turns in (self.held, self.partial):
                    turns.difference_update([key for key in turns if key[0] == body.session_id])
            case turn.TurnStarted() | turn.TurnResumed():
                self.running[body.request_id] = body.engine_id
                self.held.discard((body.session_id, body.turn_id))
            case turn.TurnInterrupted():
                self.running.pop(body.request_id, None)
                self.held.add((body.session_id, body.turn_id))
                if body.kept_tokens:
                    self.partial.add((body.session_id, body.turn_id))
            case turn.TurnCommitted():
                self.turns += 1
                self.tokens_generated += body.output_tokens
                self._recent.append((wall_s, body.output_tokens))
                self.partial_turns += (body.session_id, body.turn_id) in self.partial
                self._turn_ended(body)
            case turn.TurnDiscarded() | turn.TurnFailed():
                self._turn_ended(body)

    def _engine(self, engine_id: str, state: str) -> None:
        if engine_id in self.engines:
            self.engines[engine_id].state = state

    def _turn_ended(self, body: turn.TurnCommitted | turn.TurnDiscarded | turn.TurnFailed) -> None:
        self.running.pop(body.request_id, None)
        self.held.discard((body.session_id, body.turn_id))
        self.partial.discard((body.session_id, body.turn_id))
