"""What to ask for next: a pure function of the folded log.

`decide` is level-triggered: from the state alone it says what must have been asked for or recorded by now. A restarted
controller therefore needs no memory of its own: it folds the log, and what is missing is asked for. Each command has a
logical key, so asking again is a no-op. No clock, no randomness, no I/O, no environment.

The loop, for each step k: open admission -> enough complete groups -> close admission -> take open turns off the
engines -> pause them -> train -> sync weights -> resume -> next. Step numbers are pause numbers. An evaluation before
or after steps is an admission of its own and needs no pause. Three modes are rows of MODES: in the asynchronous ones
training goes on beside the rollouts, and only the sync needs the pause.

A rule that changes what a recorded run would decide gets a new DECIDE_VERSION and asks `state.decide_version`, so that
old histories (tests/golden/histories) are re-decided on the branch they were made by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from controller import handoff as planner
from segue.config.capabilities import realise
from segue.events import engine, handoff, offload, run, step, turn, weights, work
from segue.events.base import Body
from segue.state.run import EngineState, GroupState, RunState

DECIDE_VERSION = 2
"""1: the synchronous loop. 2: the modes, filters and the early stop; a batch is in the order of its groups, whatever
the order in which they were completed."""
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


@dataclass(frozen=True, slots=True)
class Mode:
    """pause_to_train: engines are paused while the trainer works (they share its memory). whole_batches: weights are
    synced only between batches, so that a batch comes from one version."""

    pause_to_train: bool
    whole_batches: bool

    def batches_ahead(self, state: RunState, k: int) -> int:
        """How many batches may be admitted beyond the one that is collected or trained as step k."""
        if self.pause_to_train:
            return 0
        if self.whole_batches:
            return 1 if k in state.planned else 0
        return state.config.rollout.max_staleness


MODES: dict[str, Mode] = {
    "colocated": Mode(pause_to_train=True, whole_batches=False),
    "one_step_async": Mode(pause_to_train=False, whole_batches=True),
    "fully_async": Mode(pause_to_train=False, whole_batches=False),
}


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
    stale = _stale_groups(state)
    for group in stale:
        reason = f"stale: sampled by version {group.oldest_version}, the trainer holds {state.version}"
        yield Record(work.GroupDropped("train", group.group, reason))
    for group in state.unsettled.values():
        if group in stale:
            continue
        purpose, size = _purpose(group), _group_size(state, group.purpose)
        reasons = "; ".join(f"member {m}: {why}" for m, why in sorted(group.failed.items()))
        if group.failed and purpose == "train":
            yield Record(work.GroupDropped(purpose, group.group, reasons))
        elif _teaches_nothing(state, group):
            yield Record(work.GroupDropped(purpose, group.group, "filtered: all members have the same reward"))
        elif len(group.samples) + len(group.failed) >= size:
            ids = tuple(group.samples[m].sample_id for m in sorted(group.samples))
            yield (
                Record(work.GroupCompleted(purpose, group.group, ids))
                if ids
                else Record(work.GroupDropped(purpose, group.group, reasons))
            )


def _stale_groups(state: RunState) -> list[GroupState]:
    """Training groups, complete or not, with a sample that is older than the bound by now. Checked whenever the
    trainer's version moves and again before a batch is taken; admission keeps to the same bound beforehand."""
    if state.config.rollout.mode != "fully_async":
        return []
    oldest = state.version - state.config.rollout.max_staleness
    open_groups = [group for group in state.unsettled.values() if group.purpose == "train"]
    return [g for g in (*state.trainable.values(), *open_groups) if g.samples and g.oldest_version < oldest]


def _teaches_nothing(state: RunState, group: GroupState) -> bool:
    """A complete training group whose members all got one reward: its advantages are zero."""
    rollout = state.config.rollout
    if not rollout.drop_uniform or group.purpose != "train" or len(group.samples) < rollout.group_size:
        return False
    return len({member.reward for member in group.samples.values()}) == 1


def _purpose(group: GroupState) -> Literal["train", "eval"]:
    return "train" if group.purpose == "train" else "eval"


def _group_size(state: RunState, purpose: str) -> int:
    return state.config.rollout.group_size if purpose == "train" else state.config.evaluation.group_size


def _next(state: RunState) -> Iterable[Decision]:
    if not _ready(state):
        return
    mode = MODES[state.config.rollout.mode]
    cycle = _open_cycle(state, mode)
    if cycle:
        yield from _saga(state, mode, cycle)
        return
    moves = tuple(_handoff(state, state.step, "rollout", sync=bool(_stale_engines(state))))
    if moves:
        yield from moves
        return
    yield from _sync_strays(state)
    k, last = state.step + 1, _last_step(state)
    if _evaluation_due(state, k - 1) and (k - 1) not in state.evaluations:
        yield from _evaluate(state, k - 1)
        return
    if k > last:
        yield from _finish(state, last)
        return
    yield from _roll_out(state, mode, k)


def _last_step(state: RunState) -> int:
    """The step after which the run ends: the last one, or the first whose evaluation was good enough."""
    goal = state.config.evaluation.stop_at
    good = [e.step for e in state.evaluations.values() if goal and e.reward_mean >= goal]
    return min([state.config.run.steps, *good])


def _ready(state: RunState) -> bool:
    """Every part has been up once; a part that is down later holds only what needs it."""
    services = state.admission_services()
    return (
        state.trainer is not None
        and all(service in state.services for service in services)
        and all(engine_id in state.engines for engine_id in state.engine_ids)
    )


def _open_cycle(state: RunState, mode: Mode) -> int:
    """The step whose pause has begun and is not over (or, where training needs none, is due), or 0."""
    k = state.step
    if mode.pause_to_train and _was_asked(state, work.CloseAdmission(k + 1)):
        return k + 1
    if k and any(e.paused or state.resumed.get(e.engine_id, 0) < k for e in state.up_engines()):
        return k
    return 0


def _was_asked(state: RunState, command: Body) -> bool:
    return command.logical_key() in state.asked


def _saga(state: RunState, mode: Mode, k: int) -> Iterable[Decision]:
    """The pause of step k, in the one order; each stage is entered when the facts of the one before are there."""
    rollout = state.config.rollout
    if not mode.pause_to_train and not _was_asked(state, work.CloseAdmission(k)):
        if mode.whole_batches and k < _last_step(state) and len(state.trainable) < rollout.groups_per_step:
            yield from _admit(state, mode, k)  # the next batch is not whole yet: the old weights finish it
            return
        yield Issue(work.CloseAdmission(k), tuple(state.admission_services()))
        return
    if any(state.pause_closed.get(s, 0) < k for s in state.admission_services()):
        return
    if _cuts_turns(state) and state.open_requests:
        targets = tuple(f"session-{i}" for i in range(state.session_servers))
        yield Issue(turn.AbortTurns(k, rollout.partial, rollout.drain_s), targets)
        return
    if k not in state.finished or not mode.pause_to_train:
        waiting = [e for e in state.up_engines() if state.pause_done.get(e.engine_id, 0) < k]
        for e in waiting:
            yield Issue(engine.PauseEngines(k, e.engine_id, rollout.pause_mode), (e.engine_id,))
        if waiting:
            return
    if k not in state.finished:
        yield from _plan_handoff(state, k)
        moves = tuple(_handoff(state, k, "training", sync=False))
        yield from moves
        if not moves and k not in state.planned:  # what was planned is executed again by the trainer itself
            yield _train(state, k)
        return
    stale = _stale_engines(state)
    moves = tuple(_handoff(state, k, "rollout", sync=bool(stale)))
    if moves:
        yield from moves
        return
    if stale:
        yield from _sync(state, stale)
        return
    if state.handoff_planned == k != state.handoff_finished:
        yield Record(handoff.HandoffFinished(k))
    for e in state.up_engines():
        if state.resumed.get(e.engine_id, 0) < k or e.paused:
            yield Issue(engine.ResumeEngines(k, e.engine_id, e.version), (e.engine_id,))
    yield from _checkpoint(state, k)


def _handoff(state: RunState, k: int, phase: planner.Phase, *, sync: bool) -> Iterable[Issue]:
    """The next step of the handoff to `phase` that moves memory, for every owner that has not done it; nothing where
    the next step is the training or the sync itself, or where nobody leaves the devices."""
    config = state.config.offload
    if not config.level or not MODES[state.config.rollout.mode].pause_to_train:
        return
    engines = [state.released.get(e.engine_id, frozenset()) for e in state.up_engines()]
    # A tag counts as away on the way out only if every engine has given it up, on the way back if any has.
    join = frozenset.intersection if phase == "training" else frozenset.union
    away = join(*engines) if engines else frozenset()
    trainer = state.released.get("trainer", frozenset())
    residency = frozenset([*((planner.ROLLOUT, tag) for tag in away), *((planner.TRAINER, tag) for tag in trainer)])
    sizes = planner.sizes_of(config)
    plan = planner.steps_to(
        phase, residency, order=planner.order_of(config), level=config.level, sizes=sizes, sync=sync
    )
    first = plan.steps[0] if plan.steps else None
    if first is None or first.action in ("train", "sync"):
        return
    kind = offload.Onload if first.action == "onload" else offload.Release
    owners = ["trainer"] if first.owner == planner.TRAINER else [e.engine_id for e in state.up_engines()]
    for owner in owners:
        gone = state.released.get(owner, frozenset())
        tags = tuple(tag for tag in first.tags if (tag in gone) == (kind is offload.Onload))
        if tags:
            yield Issue(kind(k, owner, state.incarnation_of(owner), state.moves.get(owner, 0) + 1, tags), (owner,))


def _plan_handoff(state: RunState, k: int) -> Iterable[Record]:
    """What the handoffs of this pause will be, with the peaks that they should reach."""
    config = state.config.offload
    if not config.level or state.handoff_planned >= k:
        return
    order = planner.order_of(config)
    _, out, back = planner.cycle(order, config.level, planner.sizes_of(config))
    steps = tuple(str(one) for one in (*out.steps, *back.steps))
    device = max(out.device_peak_bytes, back.device_peak_bytes)
    yield Record(handoff.HandoffPlanned(k, steps, device, max(out.host_peak_bytes, back.host_peak_bytes)))


def _cuts_turns(state: RunState) -> bool:
    """Whether the pause takes running requests off the engines by their ids (else the engine keeps them)."""
    rollout = state.config.rollout
    return realise(rollout.pause_mode, partial=rollout.partial, r3=state.config.r3.enabled).cut


def _train(state: RunState, k: int) -> Issue:
    groups = list(state.trainable.values())[: state.config.rollout.groups_per_step]
    if state.decide_version >= 2:  # one batch has one order, however its groups raced each other
        groups.sort(key=lambda group: group.group)
    samples = [group.samples[member] for group in groups for member in sorted(group.samples)]
    command = step.TrainStep(
        lineage=state.lineage,
        step=k,
        version=state.version,
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
    due = k % state.config.checkpoint.every == 0 or k == _last_step(state)
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


def _roll_out(state: RunState, mode: Mode, k: int) -> Iterable[Decision]:
    """Collect the batch of step k; where training needs no pause, train it and collect the next one meanwhile."""
    if k not in state.planned and len(state.trainable) >= state.config.rollout.groups_per_step:
        if mode.pause_to_train:
            yield Issue(work.CloseAdmission(k), tuple(state.admission_services()))
            return
        yield _train(state, k)
    yield from _admit(state, mode, k)


def _admit(state: RunState, mode: Mode, k: int) -> Iterable[Issue]:
    """Training groups up to where the mode, the staleness bound and the budget of open groups allow."""
    rollout = state.config.rollout
    batches = k + mode.batches_ahead(state, k)
    if not mode.pause_to_train:
        batches = min(batches, _last_step(state))
    end = batches * rollout.groups_per_step + rollout.extra_groups + state.dropped
    if rollout.max_open_groups:
        end = min(end, state.settled_train + rollout.max_open_groups)
    admission = state.admission
    current = admission is not None and admission.purpose == "train" and admission.step == k
    if not current or state.admitted_end.get("train", 0) < end:
        yield _open(state, "train", k, 0, max(end, state.admitted_end.get("train", 0)), rollout.group_size)


def _open(state: RunState, purpose: Literal["train", "eval"], k: int, first: int, end: int, size: int) -> Issue:
    number = state.admission.admission + 1 if state.admission is not None else 1
    return Issue(work.OpenAdmission(number, purpose, k, first, end, size), tuple(state.admission_services()))


def _finish(state: RunState, last: int) -> Iterable[Decision]:
    yield from _checkpoint(state, last)
    if last in state.checkpoints:
        yield Record(run.RunStopped("completed", f"{last} steps"))
