"""What must hold in every run, checked event by event: each invariant is one small class with one sentence.

`check(events)` folds a log once; the cost of an event does not grow with the log. A finding names the event at which
the invariant broke, and what it saw. What can only be said when a run is over is asked of `at_end`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from segue.config.capabilities import realise
from segue.config.schema import Config
from segue.events import engine, offload, run, sample, step, turn, weights, work
from segue.events.base import Body
from segue.events.codec import Recorded
from segue.state.answers import ANSWERING, ANSWERS, about_of


@dataclass(frozen=True, slots=True)
class Finding:
    """`position`: of the event at which it broke; that of the last event for what was missing at the end."""

    invariant: str
    position: int
    detail: str


class Invariant:
    """Base: `apply` yields what is wrong with one event, `at_end` what a run that is over still owes."""

    sentence = ""

    def __init__(self) -> None:
        self.config = Config()

    @property
    def name(self) -> str:
        return type(self).__name__

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        return ()

    def at_end(self, reason: str) -> Iterable[str]:
        return ()


_OPENINGS = (turn.TurnStarted, turn.TurnResumed)
_CLOSINGS = (turn.TurnCommitted, turn.TurnInterrupted, turn.TurnDiscarded, turn.TurnFailed)


class RequestsEndOnce(Invariant):
    sentence = "A request to an engine is opened once and has exactly one end; after it nothing of it is ever kept."

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, int] = {}
        self.cut: dict[str, str] = {}
        """turn id -> its last interrupted request, whose kept tokens may still be dropped."""

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, _OPENINGS):
            if body.request_id in self.open:
                yield f"request {body.request_id} was opened at {self.open[body.request_id]} already"
            self.open[body.request_id] = event.position
        elif isinstance(body, _CLOSINGS):
            known = self.open.pop(body.request_id, None)
            dropped_later = isinstance(body, turn.TurnDiscarded) and self.cut.get(body.turn_id) == body.request_id
            if known is None and not dropped_later:
                yield f"request {body.request_id} ended ({event.envelope.type}) without being open"
            if isinstance(body, turn.TurnInterrupted):
                self.cut[body.turn_id] = body.request_id
            else:
                self.cut.pop(body.turn_id, None)


class NothingRunsAcrossASync(Invariant):
    sentence = "Where turns are cut by a pause, no request is at an engine while its weights change."

    def __init__(self) -> None:
        super().__init__()
        self.at_engine: dict[str, set[str]] = {}
        self.engine_of: dict[str, str] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, _OPENINGS):
            self.at_engine.setdefault(body.engine_id, set()).add(body.request_id)
            self.engine_of[body.request_id] = body.engine_id
        elif isinstance(body, _CLOSINGS):
            self.at_engine.get(self.engine_of.pop(body.request_id, ""), set()).discard(body.request_id)
        elif isinstance(body, engine.EngineLost):
            self.at_engine.pop(body.engine_id, None)
        elif isinstance(body, weights.WeightsSynced) and self._cuts():
            for name in body.engines:
                if self.at_engine.get(name):
                    yield f"{len(self.at_engine[name])} requests at {name} when version {body.version} was loaded"

    def _cuts(self) -> bool:
        rollout = self.config.rollout
        return realise(rollout.pause_mode, partial=rollout.partial, r3=self.config.r3.enabled).cut


class SpansCoverEveryToken(Invariant):
    sentence = "The weight-version spans of a turn cover each of its tokens once, in order."

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if not isinstance(body, turn.TurnCommitted):
            return
        at = 0
        for start, end, _ in body.spans:
            if start != at or end <= start:
                yield f"turn {body.turn_id}: span [{start}, {end}) follows token {at}"
                return
            at = end
        if at != body.output_tokens:
            yield f"turn {body.turn_id}: spans end at {at} of {body.output_tokens} tokens"


class TurnsFollowTheirParents(Invariant):
    sentence = "A turn is committed once, below a turn of its own session that was committed before it."

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[str, set[str]] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, turn.TurnCommitted):
            known = self.turns.setdefault(body.session_id, set())
            if body.turn_id in known:
                yield f"turn {body.turn_id} of {body.session_id} was committed already"
            if body.parent_id and body.parent_id not in known:
                yield f"turn {body.turn_id} hangs below {body.parent_id}, which {body.session_id} does not have"
            known.add(body.turn_id)
        elif isinstance(body, sample.SampleReady | sample.SampleRejected):
            self.turns.pop(body.session_id, None)


class GroupsAreWhole(Invariant):
    sentence = "A group completes with a sample of every member, or is dropped; only complete groups train, whole."

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[tuple[str, int], dict[str, int]] = {}
        self.complete: dict[str, tuple[int, frozenset[str]]] = {}
        """sample id -> its group and all sample ids of that, while the group waits to be trained."""

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, sample.SampleReady) and body.group >= 0:
            self.members.setdefault((body.purpose, body.group), {})[body.sample_id] = body.member
        elif isinstance(body, work.GroupDropped):
            for name in self.members.pop((body.purpose, body.group), ()):
                self.complete.pop(name, None)
        elif isinstance(body, work.GroupCompleted):
            have = self.members.pop((body.purpose, body.group), {})
            size = self.config.rollout.group_size
            if set(body.sample_ids) - set(have):
                yield f"group {body.purpose}-{body.group} completed with samples that are not ready"
            if body.purpose == "train" and sorted(have.values()) != list(range(size)):
                yield f"group train-{body.group} completed with members {sorted(have.values())} of {size}"
            if body.purpose == "train":
                whole = frozenset(body.sample_ids)
                self.complete.update(dict.fromkeys(body.sample_ids, (body.group, whole)))
        elif isinstance(body, step.TrainStep):
            yield from self._taken(body)

    def _taken(self, body: step.TrainStep) -> Iterable[str]:
        taken = set(body.sample_ids)
        for name in body.sample_ids:
            group, whole = self.complete.pop(name, (-1, frozenset[str]()))
            if group < 0:
                yield f"step {body.step} takes {name}, whose group is not complete or was taken or dropped"
            elif not whole <= taken:
                yield f"step {body.step} takes a part of group {group}"


class TrainedOnce(Invariant):
    sentence = "Each sample trains once in the lineage of the surviving weights, and steps follow one another."

    def __init__(self) -> None:
        super().__init__()
        self.lineage = 1
        self.step_of: dict[str, int] = {}
        self.finished: dict[int, str] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, run.LineageRaised):
            self.lineage = body.lineage
            gone = set(body.abandoned_steps)
            self.step_of = {name: at for name, at in self.step_of.items() if at not in gone}
            self.finished = {at: digest for at, digest in self.finished.items() if at not in gone}
        elif isinstance(body, step.StepPlanned):
            for name in body.sample_ids:
                if self.step_of.setdefault(name, body.step) != body.step:
                    yield f"sample {name} trains in step {body.step} and did in step {self.step_of[name]}"
        elif isinstance(body, step.StepFinished):
            if body.step not in self.finished and body.step != len(self.finished) + 1:
                yield f"step {body.step} finished after {len(self.finished)} steps"
            if self.finished.setdefault(body.step, body.digest) != body.digest:
                yield f"step {body.step} finished twice in lineage {self.lineage}, with different weights"


class Staleness(Invariant):
    sentence = "No token of a batch is older than rollout.max_staleness versions, counted from the weights it trains."

    def __init__(self) -> None:
        super().__init__()
        self.oldest: dict[str, int] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, sample.SampleReady) and body.purpose == "train":
            self.oldest[body.sample_id] = body.oldest_version
        elif isinstance(body, step.TrainStep):
            for name in body.sample_ids:
                behind = body.version - self.oldest.pop(name, body.version)
                if self.config.rollout.mode == "fully_async" and behind > self.config.rollout.max_staleness:
                    yield f"step {body.step}: sample {name} is {behind} versions old"


class PausesEnd(Invariant):
    sentence = "Every pause of an engine is followed by its resume, or by the loss of the engine."

    def __init__(self) -> None:
        super().__init__()
        self.paused: dict[str, int] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, engine.EnginePaused):
            before = self.paused.get(body.engine_id, 0)
            if before and before != body.pause:
                yield f"{body.engine_id} was paused for {body.pause} while it was paused for {before}"
            self.paused[body.engine_id] = body.pause
        elif isinstance(body, engine.EngineResumed | engine.EngineLost | engine.EngineStarted):
            self.paused.pop(body.engine_id, None)

    def at_end(self, reason: str) -> Iterable[str]:
        if reason == "completed":
            yield from (f"{name} stays paused for {pause}" for name, pause in sorted(self.paused.items()))


class CommandsAreAnswered(Invariant):
    sentence = "What answers a command comes after it, and in a completed run every command has its answer."

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[tuple[object, ...], int] = {}
        self.open: dict[tuple[object, ...], tuple[int, str]] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if type(body) in ANSWERS:
            about = about_of(body)
            self.asked.setdefault(about, event.position)
            self.open[about] = (event.position, event.envelope.type)
        elif isinstance(body, ANSWERING):
            about = about_of(body)
            if about not in self.asked:
                yield f"{event.envelope.type} {about} answers nothing that was asked"
            self.open.pop(about, None)
        elif isinstance(body, run.CommandDeadLettered):
            self.open = {a: (at, name) for a, (at, name) in self.open.items() if at != body.command_position}
        elif isinstance(body, engine.EngineStarted | step.TrainerReady):
            owner = body.engine_id if isinstance(body, engine.EngineStarted) else "trainer"
            gone = [a for a in self.open if a[0] in ("release", "onload") and a[1] == owner]
            for about in gone:  # asked of an incarnation that is no more; the new one holds everything
                del self.open[about]

    def at_end(self, reason: str) -> Iterable[str]:
        if reason == "completed":
            yield from (f"{name} at {at} was never answered" for at, name in sorted(self.open.values()))


class MemoryChangesHands(Invariant):
    sentence = "Owners that share devices are never at work at once, and what is released is what is onloaded."

    def __init__(self) -> None:
        super().__init__()
        self.away: dict[str, set[str]] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        match body:
            case offload.Released():
                yield from self._move(body.owner, set(body.tags), released=True)
            case offload.Onloaded():
                yield from self._move(body.owner, set(body.tags), released=False)
            case engine.EngineStarted():
                self.away.pop(body.engine_id, None)
            case step.TrainerReady():
                self.away.pop("trainer", None)
            # Without a cause it is executed again by a process that has not said yet that it is up, all resident.
            case step.StepPlanned() if event.envelope.cause is not None and self.away.get("trainer"):
                yield f"step {body.step} began while the trainer's {sorted(self.away['trainer'])} were released"
            case engine.EngineResumed() if self.away.get(body.engine_id):
                yield f"{body.engine_id} was resumed while its {sorted(self.away[body.engine_id])} were released"
            case weights.WeightsSynced():
                for name in body.engines:
                    if "weights" in self.away.get(name, ()):
                        yield f"version {body.version} was loaded into {name}, whose weights were released"

    def _move(self, owner: str, tags: set[str], *, released: bool) -> Iterable[str]:
        away = self.away.setdefault(owner, set())
        wrong = tags & away if released else tags - away
        if wrong:
            yield f"{sorted(wrong)} of {owner} moved, but were {'released' if released else 'resident'} already"
        self.away[owner] = away | tags if released else away - tags


class VersionsGrow(Invariant):
    sentence = "The trainer's version grows by one a step, and an engine never goes back."

    def __init__(self) -> None:
        super().__init__()
        self.at_step: dict[int, int] = {}
        self.engines: dict[str, int] = {}

    def apply(self, event: Recorded, body: Body) -> Iterable[str]:
        if isinstance(body, step.StepFinished):
            before = self.at_step.get(body.step - 1)
            if before is not None and body.version <= before:
                yield f"step {body.step} made version {body.version} after {before}"
            self.at_step = {body.step: body.version}
        elif isinstance(body, engine.EngineStarted):
            self.engines[body.engine_id] = body.version
        elif isinstance(body, weights.WeightsSynced):
            for name in body.engines:
                if body.version < self.engines.get(name, 0):
                    yield f"{name} went from version {self.engines[name]} back to {body.version}"
                self.engines[name] = body.version


INVARIANTS: tuple[type[Invariant], ...] = (
    RequestsEndOnce, NothingRunsAcrossASync, SpansCoverEveryToken, TurnsFollowTheirParents, GroupsAreWhole,
    TrainedOnce, Staleness, PausesEnd, CommandsAreAnswered, MemoryChangesHands, VersionsGrow,
)  # fmt: skip


@dataclass(slots=True)
class Checker:
    """Folds a log through all invariants; `findings` grows as they break."""

    invariants: tuple[Invariant, ...] = field(default_factory=lambda: tuple(kind() for kind in INVARIANTS))
    findings: list[Finding] = field(default_factory=list)
    _position: int = 0
    _stopped: str = ""

    def apply(self, event: Recorded) -> None:
        self._position, body = event.position, event.body
        if body is None:
            return
        if isinstance(body, run.RunStarted | run.RunResumed):
            self._stopped = ""
            for one in self.invariants:
                one.config = msgspec.json.decode(body.config, type=Config)
        elif isinstance(body, run.RunStopped):
            self._stopped = body.reason
        for one in self.invariants:
            self.findings += [Finding(one.name, event.position, detail) for detail in one.apply(event, body)]

    def at_end(self) -> list[Finding]:
        """All findings, with what the run still owes where it is over."""
        for one in self.invariants if self._stopped else ():
            self.findings += [Finding(one.name, self._position, detail) for detail in one.at_end(self._stopped)]
        return self.findings


def check(events: Iterable[Recorded]) -> list[Finding]:
    """Everything that is wrong with a log, in the order of its events."""
    checker = Checker()
    for event in events:
        checker.apply(event)
    return checker.at_end()
