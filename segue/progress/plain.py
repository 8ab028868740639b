"""A run as lines: one per step, and one for whatever else a person should see in a log file."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TextIO

from segue.events import run, step, turn
from segue.events.base import Body
from segue.events.codec import Recorded
from segue.progress.view import RunView


class PlainDisplay:
    """Writes lines to `stream`. since_wall_s: earlier events are counted but not told (the past of a resumed run)."""

    def __init__(self, stream: TextIO, *, since_wall_s: float = 0.0) -> None:
        self.view = RunView()
        self._stream, self._since_wall_s = stream, since_wall_s
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def apply(self, event: Recorded) -> None:
        self.view.apply(event)
        if event.body is None or event.envelope.wall_s < self._since_wall_s:
            return
        line = self._line(event.body)
        if line:
            self._stream.write(line + "\n")
            self._stream.flush()

    def _line(self, body: Body) -> str:
        match body:
            case run.RunStarted():
                return f"run {body.run_id} started: {self.view.config.run.steps} steps"
            case run.RunResumed(whole=True):
                return f"run {body.run_id} goes on after step {self.view.step}"
            case step.StepFinished():
                return step_line(self.view, body)
            case step.EvaluationFinished():
                failed = f", {body.failed} failed" if body.failed else ""
                return (
                    f"held-out reward {body.reward_mean:.3f} after step {body.step} ({body.episodes} episodes{failed})"
                )
            case run.AlarmRaised() | run.ProcessRestarted() | run.LineageRaised() | run.CommandDeadLettered():
                return self.view.notes[-1]
            case run.RunStopped():
                return f"run {self.view.run_id} {body.reason}" + (f": {body.detail}" if body.detail else "")
            case turn.TurnStarted() if not self._phase:
                self._phase = "running"
                return f"first turn after {self.view.last_wall_s - self.view.first_wall_s:.1f} s"
        return ""


def step_line(view: RunView, body: step.StepFinished) -> str:
    """The line of a finished step."""
    total = view.config.run.steps
    done = view.steps[body.step]
    parts = [
        f"step {body.step:>{len(str(total))}}/{total}",
        f"reward {done.reward:.3f}" if done.reward is not None else "reward -",
        f"{done.samples} samples",
        f"{view.tokens_per_s:,.0f} tok/s",
        f"weights v{body.version}",
        f"trained in {body.busy_s:.1f} s",
    ]
    if view.partial_turns:
        parts.append(f"{view.partial_turns} turns carried on")
    if view.rows_replayed:
        parts.append(f"{view.rows_replayed:,} rows replayed")
    return "  ".join(parts)
