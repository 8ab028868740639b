"""What to ask for next: a pure function of the folded log.

`decide` is level-triggered: from the state alone it says what must have been asked for or recorded by now. A restarted
controller therefore needs no memory of its own: it folds the log, and what is missing is asked for. Each command has a
logical key, so asking again is a no-op. No clock, no randomness, no I/O, no environment.

The synchronous loop, for each step k: open admission -> enough complete groups -> close admission -> take open turns
off the engines -> pause them -> train -> sync weights -> resume -> next. Step numbers are pause numbers. An
evaluation before or after steps is an admission of its own and needs no pause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from segue.config.capabilities import realise
from segue.events import engine, run, step, turn, weights, work
from segue.events.base import Body
from segue.state.run import EngineState, GroupState, RunState

DECIDE_VERSION = 1
MAX_SYNC_FAILURES = 5
"""Syncs that may fail in a row before the run is given up."""


@dataclass(frozen=True, slots=True)
class Issue:
    """Append a command for these target streams."""

    command: Body
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Append a fact that follows from the state and that nobody else can state."""

    fact: Body


Decision = Issue | Record


def decide(state: RunState) -> tuple[Decision, ...]:
    """Everything that is due now and does not stand in the log yet, in order."""
    if state.stopped or not state.run_id:
        return ()
    if state.stop_asked:
        return (Record(run.RunStopped("interrupted", state.stop_asked)),)
    if state.fatal:
        return (Record(run.RunStopped("failed", state.fatal)),)
    if state.sync_failures_in_row >= MAX_SYNC_FAILURES:
        detail = f"{state.sync_failures_in_row} weight syncs failed in a row; see the SyncFailed events"
        return (Record(run.RunStopped("failed", detail)),)
    settled = tuple(_settle_groups(state))
    if settled:
        return settled
    return tuple(d for d in _next(state) if not _asked(state, d))


def _asked(state: RunState, decision: Decision) -> bool:
    return isinstance(decision, Issue) and decision.command.logical_key() in state.asked


def _settle_groups(state: RunState) -> Iterable[Record]:
    """A group completes or is dropped whole; an evaluation's group counts the members that made it."""
    for group in state.unsettled.values():
        purpose, size = _purpose(group), _group_size(state, group.purpose)
        reasons = "; ".join(f"member {m}: {why}" for m, why in sorted(group.failed.items()))
        if group.failed and purpose == "train":
            yield Record(work.GroupDropped(purpose, group.group, reasons))
        elif len(group.samples) + len(group.failed) >= size:
            ids = tuple(group.samples[m].sample_id for m in sorted(group.samples))
            yield (
                Record(work.GroupCompleted(purpose, group.group, ids))
                if ids
                else Record(work.GroupDropped(purpose, group.group, reasons))
            )


def _purpose(group: GroupState) -> Literal["train", "eval"]:
    return "train" if group.purpose == "train" else "eval"


def _group_size(state: RunState, purpose: str) -> int:
    return state.config.rollout.group_size if purpose == "train" else state.config.evaluation.group_size


def _next(state: RunState) -> Iterable[Decision]:
    if not _ready(state):
        return
    k = state.step + 1
    cycle = _open_cycle(state)
    if cycle:
        yield from _pause_train_sync_resume(state, cycle)
        return
    yield from _sync_strays(state)
    if _evaluation_due(state, k - 1) and (k - 1) not in state.evaluations:
        yield from _evaluate(state, k - 1)
        return
    if k > state.config.run.steps:
        yield from _finish(state)
        return
    yield from _roll_out(state, k)


def _ready(state: RunState) -> bool:
    """Every part has been up once; a part that is down later holds only what needs it."""
    services = state.admission_services()
    return (
        state.trainer is not None
        and all(service in state.services for service in services)
        and all(engine_id in state.engines for engine_id in state.engine_ids)
    )


def _open_cycle(state: RunState) -> int:
    """The step whose pause has begun and is not over, or 0."""
    k = state.step
    if work.CloseAdmission(k + 1).logical_key() in state.asked:
        return k + 1
    if k and any(e.paused or state.resumed.get(e.engine_id, 0) < k for e in state.up_engines()):
        return k
    return 0


def _pause_train_sync_resume(state: RunState, k: int) -> Iterable[Decision]:
    """The saga of step k, in the one order; each stage is entered when the facts of the one before are there."""
    rollout = state.config.rollout
    if any(state.pause_closed.get(s, 0) < k for s in state.admission_services()):
        return
    if _cuts_turns(state) and state.open_requests:
        targets = tuple(f"session-{i}" for i in range(state.session_servers))
        yield Issue(turn.AbortTurns(k, rollout.partial, rollout.drain_s), targets)
        return
    if k not in state.finished:
        waiting = [e for e in state.up_engines() if state.pause_done.get(e.engine_id, 0) < k]
        for e in waiting:
            yield Issue(engine.PauseEngines(k, e.engine_id, rollout.pause_mode), (e.engine_id,))
        if not waiting and state.trainer is not None:
            yield _train(state, k)
        return
    stale = _stale_engines(state)
    if stale:
        yield from _sync(state, stale)
        return
    for e in state.up_engines():
        if state.resumed.get(e.engine_id, 0) < k or e.paused:
            yield Issue(engine.ResumeEngines(k, e.engine_id, e.version), (e.engine_id,))
    yield from _checkpoint(state, k)


def _cuts_turns(state: RunState) -> bool:
    """Whether the pause takes running requests off the engines by their ids (else the engine keeps them)."""
    rollout = state.config.rollout
    return realise(rollout.pause_mode, partial=rollout.partial, r3=state.config.r3.enabled).cut


def _train(state: RunState, k: int) -> Issue:
    assert state.trainer is not None
    groups = list(state.trainable.values())[: state.config.rollout.groups_per_step]
    samples = [group.samples[member] for group in groups for member in sorted(group.samples)]
    command = step.TrainStep(
        lineage=state.lineage,
        step=k,
        version=state.trainer.version,
        sample_ids=tuple(s.sample_id for s in samples),
        frame_digests=tuple(s.frame_digest for s in samples),
        seed=state.config.run.seed * 1_000_003 + k,
    )
    return Issue(command, ("trainer",))


def _stale_engines(state: RunState) -> list[EngineState]:
    if state.trainer is None:
        return []
    return [e for e in state.up_engines() if e.torn or e.version != state.trainer.version]


def _sync(state: RunState, engines: list[EngineState]) -> Iterable[Decision]:
    assert state.trainer is not None
    command = weights.SyncWeights(
        sync=state.syncs_settled + 1,
        version=state.trainer.version,
        transport=state.config.weights.transport,
        flush_cache=state.config.rollout.pause_mode != "in_place",
        engines=tuple(weights.EngineAddress(e.engine_id, e.incarnation, e.url) for e in engines),
    )
    yield Issue(command, ("trainer",))


def _sync_strays(state: RunState) -> Iterable[Decision]:
    """Engines that came back with other weights get the admitted ones while the rest goes on."""
    stale = _stale_engines(state)
    if stale:
        yield from _sync(state, stale)


def _checkpoint(state: RunState, k: int) -> Iterable[Decision]:
    due = k % state.config.checkpoint.every == 0 or k == state.config.run.steps
    if due and k not in state.checkpoints:
        yield Issue(step.SaveCheckpoint(state.lineage, k), ("trainer",))


def _evaluation_due(state: RunState, after_step: int) -> bool:
    evaluation = state.config.evaluation
    if evaluation.groups == 0:
        return False
    if after_step in (0, state.config.run.steps):
        return True
    return evaluation.every > 0 and after_step % evaluation.every == 0


def _evaluate(state: RunState, after_step: int) -> Iterable[Decision]:
    evaluation = state.config.evaluation
    order = [s for s in range(after_step + 1) if _evaluation_due(state, s)]
    first = (len(order) - 1) * evaluation.groups
    end = first + evaluation.groups
    assert state.trainer is not None
    groups = [state.group("eval", g) for g in range(first, end)]
    if all(g.settled for g in groups):
        done = [s for g in groups for s in g.samples.values()]
        mean = sum(s.reward for s in done) / len(done) if done else 0.0
        failed = evaluation.groups * evaluation.group_size - len(done)
        yield Record(step.EvaluationFinished(after_step, after_step, state.trainer.version, len(done), failed, mean))
        return
    targets = tuple(f"session-{i}" for i in range(state.session_servers))
    yield Issue(step.Evaluate(after_step, after_step, state.trainer.version, first, end), targets)
    if state.admitted_end.get("eval", 0) < end:
        yield _open(state, "eval", after_step, first, end, evaluation.group_size)


def _roll_out(state: RunState, k: int) -> Iterable[Decision]:
    rollout = state.config.rollout
    if len(state.trainable) >= rollout.groups_per_step:
        yield Issue(work.CloseAdmission(k), tuple(state.admission_services()))
        return
    end = k * rollout.groups_per_step + rollout.extra_groups + state.dropped
    admission = state.admission
    current = admission is not None and admission.purpose == "train" and admission.step == k
    if not current or state.admitted_end.get("train", 0) < end:
        yield _open(state, "train", k, 0, max(end, state.admitted_end.get("train", 0)), rollout.group_size)


def _open(state: RunState, purpose: Literal["train", "eval"], k: int, first: int, end: int, size: int) -> Issue:
    number = state.admission.admission + 1 if state.admission is not None else 1
    return Issue(work.OpenAdmission(number, purpose, k, first, end, size), tuple(state.admission_services()))


def _finish(state: RunState) -> Iterable[Decision]:
    last = state.config.run.steps
    yield from _checkpoint(state, last)
    if last in state.checkpoints:
        yield Record(run.RunStopped("completed", f"{last} steps"))
