from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from segue.config.load import build, resolve
from segue.events import codec, engine, run, sample, session, step, turn, weights, work
from segue.events.base import Body, Bulk, Envelope
from segue.events.codec import Recorded
from segue.ids import EventId
from segue.progress import Extras, RunView, build_summary, open_display, plot_rewards, write_summary
from segue.progress.live import LiveDisplay, render, sparkline
from segue.progress.plain import PlainDisplay
from segue.testing import ManualClock

NOTHING = Bulk("0" * 64, 0, b"")


class Tape:
    """A recorded log, written event by event with its wall times."""

    def __init__(self, **options: object) -> None:
        self.events: list[Recorded] = []
        config = build({"run.steps": 3, **{key.replace("__", "."): value for key, value in options.items()}})
        self.config = resolve(config)[0].decode()
        self.at(100.0, run.RunStarted(
            run_id="r-1", config=self.config, config_digest="d", decide_version=1, lineage=1, session_servers=1,
            engines=("engine-0",),
        ))  # fmt: skip

    def at(self, wall_s: float, *bodies: Body) -> None:
        for body in bodies:
            position = len(self.events) + 1
            raw = msgspec.Raw(codec.encode_body(body))
            identity = EventId("r-1", "test", 1, position)
            envelope = Envelope(identity, body.SPEC.name, body.SPEC.version, wall_s, wall_s, raw)
            self.events.append(codec.decode(position, codec.encode(envelope)))

    def view(self) -> RunView:
        view = RunView()
        for event in self.events:
            view.apply(event)
        return view

    def summary(self, **extras: Any) -> dict[str, Any]:
        return dict(build_summary(self.events, Extras(**extras)))


def admit(number: int, purpose: Any = "train") -> work.OpenAdmission:
    return work.OpenAdmission(admission=number, purpose=purpose, step=number, first_group=0, end_group=1, group_size=2)


def opened(number: int) -> work.AdmissionOpened:
    return work.AdmissionOpened(admission=number, service="session-0")


def started(request: str, turn_id: str = "t1", where: str = "engine-0") -> turn.TurnStarted:
    return turn.TurnStarted(session_id="s1", turn_id=turn_id, request_id=request, engine_id=where, prompt_tokens=4)


def resumed(request: str, turn_id: str = "t1") -> turn.TurnResumed:
    return turn.TurnResumed(session_id="s1", turn_id=turn_id, request_id=request, engine_id="engine-0", kept_tokens=3)


def cut(request: str, turn_id: str = "t1", kept: int = 3) -> turn.TurnInterrupted:
    return turn.TurnInterrupted(
        session_id="s1", turn_id=turn_id, request_id=request, engine_id="engine-0", kept_tokens=kept, tokens=None,
        token_digest="d",
    )  # fmt: skip


def committed(request: str, turn_id: str = "t1", tokens: int = 10) -> turn.TurnCommitted:
    return turn.TurnCommitted(
        session_id="s1", turn_id=turn_id, parent_id="", request_id=request, request_digest="q", messages=NOTHING,
        tokens=NOTHING, spans=(), finish_reason="stop", prompt_tokens=4, output_tokens=tokens, parts=1,
        token_digest="t", logprob_digest="l",
    )  # fmt: skip


def discarded(request: str, turn_id: str = "t1") -> turn.TurnDiscarded:
    return turn.TurnDiscarded(session_id="s1", turn_id=turn_id, request_id=request, dropped_tokens=3, reason="x")


def finished(number: int, began: float, lineage: int = 1, **metrics: float) -> tuple[Body, Body]:
    return (
        step.StepPlanned(lineage=lineage, step=number, sample_ids=("a", "b"), frame_digests=("x", "y"), seed=1),
        step.StepFinished(
            lineage=lineage, step=number, version=number, digest="d", metrics=metrics, started_wall_s=began, busy_s=1.5
        ),
    )


def evaluated(number: int, at_step: int, reward: float) -> step.EvaluationFinished:
    return step.EvaluationFinished(
        evaluation=number, step=at_step, version=at_step, episodes=8, failed=1, reward_mean=reward
    )


def test_a_view_counts_what_is_open_running_and_held() -> None:
    tape = Tape()
    tape.at(101, session.SessionOpened(
        session_id="s1", token_digest="d", rollout_id="r", group=0, member=0, seed=0, purpose="train",
        temperature=1.0, ttl_s=1, token_budget=9,
    ))  # fmt: skip
    tape.at(102, started("q1", "t1"), started("q2", "t2"), started("q3", "t3"))
    tape.at(103, cut("q1", "t1"), cut("q2", "t2", kept=0))
    view = tape.view()
    assert (len(view.open_sessions), set(view.running), view.held) == (1, {"q3"}, {("s1", "t1"), ("s1", "t2")})
    tape.at(104, resumed("q4", "t1"), resumed("q5", "t2"))
    assert (set(tape.view().running), tape.view().held) == ({"q3", "q4", "q5"}, set())
    tape.at(105, committed("q4", "t1"), committed("q5", "t2"), cut("q3", "t3"))
    tape.at(106, session.SessionFinished(session_id="s1", status="ok"))
    view = tape.view()
    assert (view.running, view.held, view.partial, view.open_sessions) == ({}, set(), set(), set())
    assert (view.turns, view.tokens_generated, view.partial_turns) == (2, 20, 1)


def test_a_partial_turn_counts_only_if_its_kept_tokens_were_committed() -> None:
    tape = Tape()
    tape.at(101, started("q1"), cut("q1"), resumed("q2"), cut("q2"), resumed("q3"), committed("q3"))
    assert tape.view().partial_turns == 1
    tape.at(
        102, started("q4", "t2"), cut("q4", "t2"), discarded("q4", "t2"), started("q5", "t2"), committed("q5", "t2")
    )
    assert tape.view().partial_turns == 1


def test_the_rate_covers_ten_seconds_of_event_time() -> None:
    tape = Tape()
    tape.at(110, admit(1), opened(1))
    tape.at(112, committed("a", "t1", 30))
    assert tape.view().tokens_per_s == 15.0
    tape.at(121, committed("b", "t2", 50))
    assert tape.view().tokens_per_s == 8.0
    tape.at(125, committed("c", "t3", 10))
    assert tape.view().tokens_per_s == 6.0


def test_a_view_follows_engines_weights_and_phases() -> None:
    tape = Tape()
    phases = [tape.view().phase]

    def then(*bodies: Body) -> None:
        tape.at(110, *bodies)
        phases.append(tape.view().phase)

    then(engine.EngineStarted(
        engine_id="engine-0", incarnation="i", url="u", kind="fake", version=0, checksum="c", start_s=1
    ))  # fmt: skip
    then(admit(0, "eval"))
    then(admit(1))
    then(work.CloseAdmission(pause=1))
    then(engine.EnginePaused(pause=1, engine_id="engine-0", mode="abort", realised_as="retract", took_s=0))
    assert tape.view().engines["engine-0"].state == "paused"
    then(finished(1, 109)[0])
    then(finished(1, 109)[1])
    then(weights.SyncBegun(sync=1, version=1, engines=("engine-0",)))
    then(weights.WeightsSynced(
        sync=1, version=1, digest="d", engines=("engine-0",), bytes=1, took_s=1, proved=True
    ))  # fmt: skip
    then(engine.EngineResumed(pause=1, engine_id="engine-0", version=1))
    assert (tape.view().engines["engine-0"].state, tape.view().engines["engine-0"].version) == ("up", 1)
    assert tape.view().weight_version == 1
    then(started("q1"), engine.EngineLost(engine_id="engine-0", incarnation="i", reason="killed"))
    assert (tape.view().engines["engine-0"].state, tape.view().running) == ("lost", {})
    then(run.RunStopped(reason="completed"))
    assert phases == [
        "starting", "starting", "evaluating", "rolling out", "pausing", "pausing", "training", "trained",
        "syncing weights", "syncing weights", "syncing weights", "syncing weights", "completed",
    ]  # fmt: skip


def test_abandoned_steps_leave_the_counts_and_a_resumed_run_goes_on() -> None:
    tape = Tape()
    tape.at(
        110, *finished(1, 109, reward_mean=0.1, rows_replayed=5), *finished(2, 109, reward_mean=0.2, rows_replayed=7)
    )
    tape.at(111, started("q1"), run.RunStopped(reason="interrupted"))
    tape.at(120, run.RunResumed(
        run_id="r-1", config=tape.config, config_digest="d", decide_version=1, lineage=1, restart=1, whole=True
    ))  # fmt: skip
    tape.at(121, run.LineageRaised(lineage=2, abandoned_steps=(2,), first_version=3))
    view = tape.view()
    assert (view.step, view.reward, view.rows_replayed, view.samples_trained) == (1, 0.1, 5, 2)
    assert (view.stopped, view.restarts_of_run, view.running) == ("", 1, {})
    tape.at(122, *finished(2, 121, lineage=2, reward_mean=0.4, rows_replayed=6))
    assert (tape.view().reward, tape.view().rows_replayed) == (0.4, 11)


def test_a_recorded_configuration_of_another_build_is_still_shown() -> None:
    view = RunView()
    tape = Tape()
    tape.config = '{"run": {"steps": 7, "gone": 1}, "old_section": {}}'
    tape.at(101, run.RunResumed(
        run_id="r-1", config=tape.config, config_digest="d", decide_version=1, lineage=1, restart=1, whole=False
    ))  # fmt: skip
    for event in tape.events:
        view.apply(event)
    assert view.config.run.steps == 7


def whole_run() -> Tape:
    tape = Tape(engine__kind="sglang", trainer__kind="megatron", environment__baselines={"prompt_blind": 0.25})
    tape.at(110, admit(0, "eval"), opened(0))
    tape.at(111, started("e1", "e1"))
    tape.at(113, committed("e1", "e1"))
    tape.at(114, evaluated(0, 0, 0.2), admit(1), opened(1))
    tape.at(115, started("q1"))
    tape.at(116, started("q2", "t2"))
    tape.at(118, cut("q1"), committed("q2", "t2"))
    tape.at(120, *finished(
        1, 119, reward_mean=0.3, rows_replayed=40, logprob_abs_diff_mean=1e-6, logprob_abs_diff_tokens=30,
        logprob_abs_diff_max=5e-6, logprob_abs_diff_mean_older=0.0, logprob_abs_diff_tokens_older=0,
    ))  # fmt: skip
    tape.at(121, admit(2), opened(2), resumed("q3"))
    tape.at(122, committed("q3"))
    tape.at(130, *finished(
        2, 124, reward_mean=0.5, rows_replayed=2, logprob_abs_diff_mean=4e-6, logprob_abs_diff_tokens=10,
        logprob_abs_diff_max=9e-6, logprob_abs_diff_mean_older=0.5, logprob_abs_diff_tokens_older=3,
    ))  # fmt: skip
    tape.at(131, evaluated(1, 2, 0.6), run.AlarmRaised(kind="stall", subject="x", detail="y"))
    tape.at(132, run.ProcessRestarted(process="router", count=1, exit_code=-9, backoff_s=1))
    tape.at(133, weights.WeightsSynced(sync=1, version=2, digest="d", engines=(), bytes=1, took_s=1, proved=True))
    tape.at(134, run.RunStopped(reason="completed"))
    return tape


def test_the_summary_of_a_whole_run() -> None:
    summary = whole_run().summary(started_wall_s=90.0, peak_rss_bytes=3 * 2**30)
    # 110 to 130; running: 111-113, 115-118, 119-120, 121-122, 124-130
    assert summary.pop("overhead_fraction") == pytest.approx(1 - 13 / 20)
    assert summary.pop("logprob_abs_diff_mean") == pytest.approx(1.75e-6)
    assert summary == {
        "run_id": "r-1",
        "status": "completed",
        "steps": 2,
        "reward_first": 0.2,
        "reward_last": 0.6,
        "reward_train_by_step": [[1, 0.3], [2, 0.5]],
        "reward_eval": [[0, 0.2], [2, 0.6]],
        "reward_prompt_blind": 0.25,
        "baselines": {"prompt_blind": 0.25},
        "train_wall_s": 15.0,
        "start_wall_s": 20.0,
        "wall_s": 44.0,
        "engine": "sglang",
        "trainer": "megatron-core",
        "weight_version": 2,
        "logprob_abs_diff_max": 9e-6,
        "logprob_abs_diff_mean_carried": None,
        "logprob_abs_diff_mean_older": 0.5,
        "logprob_abs_diff_tokens": 40,
        "logprob_abs_diff_tokens_carried": 0,
        "logprob_abs_diff_tokens_older": 3,
        "rows_replayed": 42,
        "partial_turns": 1,
        "turns": 3,
        "tokens_generated": 30,
        "samples_trained": 4,
        "restarts": 1,
        "alarms": 1,
        "peak_rss_gib": 3.0,
    }


def test_a_run_without_evaluations_takes_its_rewards_from_the_steps() -> None:
    tape = Tape()
    tape.at(120, *finished(1, 119, reward_mean=0.3), *finished(2, 119, reward_mean=0.4))
    summary = tape.summary(status="failed", baselines={"prompt_blind": 0.1})
    assert (summary["reward_first"], summary["reward_last"], summary["reward_eval"]) == (0.3, 0.4, [])
    assert (summary["status"], summary["reward_prompt_blind"]) == ("failed", 0.1)


def test_what_cannot_be_known_is_none() -> None:
    summary = Tape().summary()
    unknown = (
        "reward_first", "reward_last", "reward_prompt_blind", "train_wall_s", "start_wall_s", "overhead_fraction",
        "logprob_abs_diff_mean", "logprob_abs_diff_max", "logprob_abs_diff_mean_older", "peak_rss_gib",
    )  # fmt: skip
    for key in unknown:
        assert summary[key] is None, key
    assert (summary["status"], summary["steps"]) == ("running", 0)


def test_overlapping_and_lost_requests_count_once_and_only_while_they_ran() -> None:
    tape = Tape()
    tape.at(110, admit(1), opened(1), started("a", "a"), started("b", "b", "engine-1"), started("c", "c"))
    tape.at(112, committed("a", "a"))
    tape.at(114, engine.EngineLost(engine_id="engine-1", incarnation="i", reason="killed"))
    tape.at(115, committed("c", "c"))
    tape.at(118, discarded("b", "b"))
    tape.at(120, *finished(1, 120))
    assert tape.summary()["overhead_fraction"] == pytest.approx(0.5)


def test_time_in_which_the_whole_run_was_down_is_overhead() -> None:
    tape = Tape()
    tape.at(110, admit(1), opened(1), started("a"))
    tape.at(112, session.SessionFinished(session_id="other", status="ok"))
    tape.at(140, run.RunResumed(
        run_id="r-1", config=tape.config, config_digest="d", decide_version=1, lineage=1, restart=1, whole=True
    ))  # fmt: skip
    tape.at(141, discarded("a"))
    tape.at(150, *finished(1, 148))
    assert tape.summary()["overhead_fraction"] == pytest.approx(1 - 4 / 40)


def test_a_resumed_start_is_measured_to_its_own_first_admission() -> None:
    tape = Tape()
    tape.at(110, opened(1))
    tape.at(210, opened(2))
    assert tape.summary(started_wall_s=200.0)["start_wall_s"] == 10.0


def test_a_summary_is_written_whole(tmp_path: Path) -> None:
    summary = build_summary(whole_run().events, Extras())
    path = tmp_path / "summary.json"
    write_summary(path, summary)
    assert json.loads(path.read_text()) == summary
    assert list(tmp_path.iterdir()) == [path]


def test_plain_lines_tell_a_run() -> None:
    out = io.StringIO()
    with PlainDisplay(out) as display:
        for event in whole_run().events:
            display.apply(event)
    assert out.getvalue().splitlines() == [
        "run r-1 started: 3 steps",
        "first turn after 11.0 s",
        "held-out reward 0.200 after step 0 (8 episodes, 1 failed)",
        "step 1/3  reward 0.300  2 samples  2 tok/s  weights v1  trained in 1.5 s  40 rows replayed",
        "step 2/3  reward 0.500  2 samples  1 tok/s  weights v2  trained in 1.5 s  1 turns carried on  "
        "42 rows replayed",
        "held-out reward 0.600 after step 2 (8 episodes, 1 failed)",
        "alarm: stall x: y",
        "router was started again (exit code -9, restart 1)",
        "run r-1 completed",
    ]


def test_the_past_of_a_resumed_run_is_counted_but_not_told() -> None:
    out = io.StringIO()
    with PlainDisplay(out, since_wall_s=131.0) as display:
        for event in whole_run().events:
            display.apply(event)
    assert out.getvalue().startswith("held-out reward 0.600 after step 2")
    assert display.view.step == 2


def text_of(view: RunView, now_wall_s: float) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render(view, now_wall_s))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_panel_shows_a_fresh_a_running_and_an_ended_run() -> None:
    assert "segue   starting   0:00" in text_of(RunView(), 5000.0)
    tape = whole_run()
    del tape.events[-1]
    running = text_of(tape.view(), 225.0)
    for part in ("r-1", "2:05", "2/3", "0.500", "▁█", "0.600 after step 2   (at first 0.200)", "30 in 3 turns",
                 "1 carried on", "v2   42 route rows", "1 restarts   1 alarms", "alarm: stall x: y"):  # fmt: skip
        assert part in running, part
    assert "completed   0:34" in text_of(whole_run().view(), 9999.0)


def test_the_live_display_leaves_its_last_picture() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveDisplay(console, ManualClock()) as display:
        for event in whole_run().events:
            display.apply(event)
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "completed" in file.getvalue().rsplit("╭", 1)[1]


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(open_display(stream=io.StringIO()), PlainDisplay)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(open_display(stream=Terminal()), LiveDisplay)
    assert isinstance(open_display(stream=Terminal(), plain=True), PlainDisplay)


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert len(sparkline([float(i) for i in range(100)])) == 32
    assert sparkline([]) == ""


def test_the_plot_is_a_picture_or_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reward.png"
    assert plot_rewards(Tape().summary(), path) == "no reward.png: no step has finished"
    assert plot_rewards(whole_run().summary(), path) == f"wrote {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    path.unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'segue[plot]'" in plot_rewards(whole_run().summary(), path)
    assert not path.exists()


def test_rejected_samples_are_noted() -> None:
    tape = Tape()
    tape.at(120, sample.SampleRejected(
        rollout_id="r", session_id="s", purpose="train", group=0, member=0, reason="no turn"
    ))  # fmt: skip
    assert list(tape.view().notes) == ["rollout r gave no sample: no turn"]
