"""A run on a terminal: one panel that redraws itself.

Rich draws from a thread of its own, so that the clock moves while no event comes; the lock keeps it from reading the
view while an event is folded in.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from segue.clock import Clock, SystemClock
from segue.events.codec import Recorded
from segue.progress.view import RunView

_REFRESH_PER_S = 4
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_STEPS = 32
_STATE_STYLE = {"up": "green", "paused": "yellow", "torn": "red", "lost": "red"}


class LiveDisplay:
    """Use as a context manager; the last picture stays on the terminal."""

    def __init__(self, console: Console | None = None, clock: Clock | None = None) -> None:
        self.view = RunView()
        self._lock = threading.Lock()
        self._clock = clock or SystemClock()
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=_REFRESH_PER_S, redirect_stderr=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def apply(self, event: Recorded) -> None:
        with self._lock:
            self.view.apply(event)

    def _draw(self) -> RenderableType:
        with self._lock:
            return render(self.view, self._clock.wall_s())


def render(view: RunView, now_wall_s: float) -> Panel:
    """The panel for a view, as seen at this wall time."""
    elapsed_s = (view.last_wall_s if view.stopped else now_wall_s) - view.first_wall_s if view.first_wall_s else 0.0
    total = max(view.config.run.steps, 1)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    head = Table.grid(padding=(0, 1))
    head.add_row(f"{view.step}/{view.config.run.steps}", ProgressBar(total=total, completed=view.step, width=36))
    grid.add_row("step", head)
    grid.add_row("reward", _rewards(view))
    grid.add_row("held-out", _held_out(view))
    grid.add_row("tokens", f"{view.tokens_per_s:,.0f}/s   {view.tokens_generated:,} in {view.turns:,} turns")
    waiting = f"{len(view.running)} turns running, {len(view.held)} held"
    grid.add_row("sessions", f"{len(view.open_sessions)} open   {waiting}   {view.partial_turns} carried on")
    grid.add_row("weights", f"v{view.weight_version}   {view.rows_replayed:,} route rows replayed")
    grid.add_row("engines", _engines(view))
    troubles = f"{view.restarts} restarts   {view.alarms} alarms"
    grid.add_row("trouble", Text(troubles, style="yellow" if view.restarts or view.alarms else ""))
    notes = [Text(note, style="dim", overflow="ellipsis", no_wrap=True) for note in view.notes]
    minutes, seconds = divmod(int(max(elapsed_s, 0.0)), 60)
    title = f"{view.run_id or 'segue'}   {view.phase}   {minutes}:{seconds:02d}"
    return Panel(Group(grid, *notes), title=title, title_align="left", border_style="blue", width=96)


def sparkline(values: list[float]) -> str:
    """The last values as a row of bars from their lowest to their highest."""
    shown = values[-_SPARK_STEPS:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)


def _rewards(view: RunView) -> str:
    rewards = [done.reward for _, done in sorted(view.steps.items()) if done.reward is not None]
    return f"{rewards[-1]:.3f}   {sparkline(rewards)}" if rewards else "-"


def _held_out(view: RunView) -> str:
    done = [evaluation for _, evaluation in sorted(view.evaluations.items())]
    if not done:
        return "-"
    first, last = done[0], done[-1]
    moved = f"   (at first {first.reward_mean:.3f})" if len(done) > 1 else ""
    return f"{last.reward_mean:.3f} after step {last.step}{moved}"


def _engines(view: RunView) -> Text:
    text = Text()
    for name, state in sorted(view.engines.items()):
        text.append(f"{name} {state.state} v{state.version}   ", style=_STATE_STYLE[state.state])
    return text if view.engines else Text("none yet")
