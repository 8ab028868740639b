"""summary.json: what came out of a run, from its log and from the few things that only its supervisor knows.

Invariant: everything but `Extras` comes from the log, so the summary of an old run can be made again from its log.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from segue.events import engine, run, step, turn, work
from segue.events.codec import Recorded
from segue.progress.view import RunView
from segue.wire.frame import JSON

_ENDS = (turn.TurnCommitted, turn.TurnInterrupted, turn.TurnDiscarded, turn.TurnFailed)
_TRAINER_NAMES = {"megatron": "megatron-core"}


@dataclass(frozen=True, slots=True)
class Extras:
    """What the log does not say.

    started_wall_s: when the supervisor started (of the last start, for a resumed run); peak_rss_bytes: highest sum over
    the run's processes; status: how it ended, if it ended without RunStopped; baselines: rewards to compare with, by
    name, over those of the run's configuration.
    """

    started_wall_s: float | None = None
    peak_rss_bytes: int | None = None
    status: str = ""
    baselines: Mapping[str, float] = field(default_factory=dict)


class _Busy:
    """When at least one request ran on an engine, or a training pass: half-open intervals of wall time."""

    def __init__(self) -> None:
        self._starts, self._ends = array("d"), array("d")
        self._open: dict[str, tuple[float, str]] = {}
        self._last_wall_s = 0.0

    def apply(self, event: Recorded) -> None:
        wall_s, body = event.envelope.wall_s, event.body
        if isinstance(body, turn.TurnStarted | turn.TurnResumed):
            self._open[body.request_id] = wall_s, body.engine_id
        elif isinstance(body, _ENDS):
            self._close(body.request_id, wall_s)
        elif isinstance(body, engine.EngineLost):
            for request_id in [r for r, (_, where) in self._open.items() if where == body.engine_id]:
                self._close(request_id, wall_s)
        elif isinstance(body, run.RunResumed) and body.whole:  # whatever ran had ended with its process
            for request_id in list(self._open):
                self._close(request_id, self._last_wall_s)
        elif isinstance(body, step.StepFinished):
            self._add(body.started_wall_s, wall_s)
        self._last_wall_s = wall_s

    def covered_s(self, begin: float, end: float) -> float:
        """Seconds of [begin, end) in which something ran; what is open still runs until `end`."""
        starts = np.concatenate([np.array(self._starts), np.array([start for start, _ in self._open.values()])])
        ends = np.concatenate([np.array(self._ends), np.full(len(self._open), end)])
        if not len(starts):
            return 0.0
        starts, ends = np.clip(starts, begin, end), np.clip(ends, begin, end)
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        before = np.concatenate([[begin], ends[:-1]])
        return float(np.maximum(ends - np.maximum(starts, before), 0.0).sum())

    def _close(self, request_id: str, wall_s: float) -> None:
        start, _ = self._open.pop(request_id, (wall_s, ""))
        self._add(start, wall_s)

    def _add(self, start: float, end: float) -> None:
        if end > start:
            self._starts.append(start)
            self._ends.append(end)


def build_summary(events: Iterable[Recorded], extras: Extras) -> dict[str, JSON]:
    """The summary as JSON values; a key whose value cannot be known is None. Rewards are [step, reward] pairs."""
    view, busy = RunView(), _Busy()
    training_admitted = False
    first_turn_wall_s = ready_wall_s = None
    for event in events:
        wall_s, body = event.envelope.wall_s, event.body
        view.apply(event)
        busy.apply(event)
        if isinstance(body, work.OpenAdmission) and body.purpose == "train":
            training_admitted = True
        elif isinstance(body, turn.TurnStarted) and training_admitted and first_turn_wall_s is None:
            first_turn_wall_s = wall_s
        elif isinstance(body, work.AdmissionOpened) and ready_wall_s is None and wall_s >= (extras.started_wall_s or 0):
            ready_wall_s = wall_s
    finished_wall_s = max((done.finished_wall_s for done in view.steps.values()), default=None)
    baselines = {"prompt_blind": None, **view.config.environment.baselines, **extras.baselines}
    return {
        "run_id": view.run_id,
        "status": view.stopped or extras.status or "running",
        "steps": view.step,
        **_rewards(view),
        **{f"reward_{name}": value for name, value in baselines.items()},
        "baselines": {name: value for name, value in baselines.items() if value is not None},
        "train_wall_s": _between(first_turn_wall_s, finished_wall_s),
        "start_wall_s": _between(extras.started_wall_s, ready_wall_s),
        "wall_s": view.last_wall_s - min(extras.started_wall_s or view.first_wall_s, view.first_wall_s),
        "engine": view.config.engine.kind,
        "trainer": _TRAINER_NAMES.get(view.config.trainer.kind, view.config.trainer.kind),
        "weight_version": view.weight_version,
        "overhead_fraction": _overhead(view.rollout_wall_s, finished_wall_s, busy),
        **_differences(view),
        "rows_replayed": view.rows_replayed,
        "partial_turns": view.partial_turns,
        "turns": view.turns,
        "tokens_generated": view.tokens_generated,
        "samples_trained": view.samples_trained,
        "restarts": view.restarts,
        "alarms": view.alarms,
        "peak_rss_gib": None if extras.peak_rss_bytes is None else extras.peak_rss_bytes / 2**30,
    }


def write_summary(path: Path, summary: Mapping[str, JSON]) -> None:
    """Write it whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _rewards(view: RunView) -> dict[str, JSON]:
    """First and last reward are those of the evaluations, or of the steps in a run without evaluations."""
    trained = [[done.step, done.reward] for _, done in sorted(view.steps.items()) if done.reward is not None]
    evaluated = [[done.step, done.reward_mean] for _, done in sorted(view.evaluations.items())]
    told = evaluated or trained
    return {
        "reward_first": told[0][1] if told else None,
        "reward_last": told[-1][1] if told else None,
        "reward_train_by_step": trained,
        "reward_eval": evaluated,
    }


def _differences(view: RunView) -> dict[str, JSON]:
    """How far the trainer's log-probs of sampled tokens are from the engines', weighted by tokens.

    Over tokens that the step's own weights sampled on a context of their own; `_carried`: sampled by them after tokens
    of older weights (a conversation that went on over a weight sync); `_older`: sampled by older weights. The counts
    let a reader pool them: mean and `_carried` together cover every token of the step's own weights.
    """
    measured = [m for m in (done.metrics for done in view.steps.values()) if m.get("logprob_abs_diff_tokens", 0.0) > 0]
    return {
        "logprob_abs_diff_mean": _weighted(view, ""),
        "logprob_abs_diff_max": max((m["logprob_abs_diff_max"] for m in measured), default=None),
        "logprob_abs_diff_mean_carried": _weighted(view, "_carried"),
        "logprob_abs_diff_mean_older": _weighted(view, "_older"),
        **{
            f"logprob_abs_diff_tokens{which}": int(view.total(f"logprob_abs_diff_tokens{which}"))
            for which in ("", "_carried", "_older")
        },
    }


def _weighted(view: RunView, which: str) -> float | None:
    mean, tokens = f"logprob_abs_diff_mean{which}", f"logprob_abs_diff_tokens{which}"
    total = view.total(tokens)
    if not total:
        return None
    return sum(done.metrics.get(mean, 0.0) * done.metrics.get(tokens, 0.0) for done in view.steps.values()) / total


def _overhead(begin: float, end: float | None, busy: _Busy) -> float | None:
    """Share of the time from the first admission to the last step in which neither an engine nor the trainer worked."""
    if not begin or end is None or end <= begin:
        return None
    return 1.0 - busy.covered_s(begin, end) / (end - begin)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
