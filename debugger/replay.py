"""Re-deciding a recorded run: fold its facts, ask `decide` again, and compare with what the controller appended.

Every command and fact of the controller names as its cause the last event that it had folded. So the state at each
decision is known exactly, and `decide` on it must contain what was appended. `decide` follows the branch of the
version that the run recorded (RunStarted, RunResumed), or the newest with `as_today`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.decide import DECIDE_VERSION, Issue, decide
from segue.events import run
from segue.events.base import Body
from segue.events.codec import Recorded
from segue.ids import EventId
from segue.state import RunState

PRODUCER = "controller"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that comes out otherwise: the event that was recorded, and what is decided in its place."""

    recorded: Recorded
    got: tuple[Body, ...]

    def __str__(self) -> str:
        said = ", ".join(str(body) for body in self.got) or "nothing"
        return f"event {self.recorded.position}: recorded {self.recorded.body}, decided {said}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`decisions`: how many were compared."""

    decisions: int
    difference: Difference | None


def replay(events: Sequence[Recorded], *, as_today: bool = False) -> Outcome:
    """Compare every decision of a recorded run, up to the first that differs. Reads nothing but `events`."""
    state, made = RunState(), 0
    decided: dict[EventId | None, list[Recorded]] = {}
    for event in _decisions(events):
        decided.setdefault(event.envelope.cause, []).append(event)
    for event in events:
        state.apply(event)
        if as_today and isinstance(event.body, run.RunStarted | run.RunResumed):
            state.decide_version = DECIDE_VERSION
        recorded = decided.get(event.id, ())
        bodies = [d.command if isinstance(d, Issue) else d.fact for d in decide(state)] if recorded else []
        for one in recorded:
            if one.body not in bodies:
                return Outcome(made, Difference(one, tuple(bodies)))
            made += 1
    return Outcome(made, None)


def _decisions(events: Iterable[Recorded]) -> Iterable[Recorded]:
    """What the controller decided: all that it appended but its announcements and alarms, which come of time."""
    told = (run.RunStarted, run.RunResumed, run.AlarmRaised)
    return (e for e in events if e.id.producer == PRODUCER and e.body is not None and not isinstance(e.body, told))
