"""What a person gets of a run beside its log: the display while it runs, summary and plot when it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from controller import launch, rundir
from segue.config import Config
from segue.config.check import check_start
from segue.config.model import check_model
from segue.errors import LogError
from segue.events import Recorded
from segue.log.reader import open_reader
from segue.progress import Extras, RunView, build_summary, open_display, plot_rewards, write_summary
from segue.state.waits import Wait, Waits

EXIT_CODES = {"completed": 0, "interrupted": 130}


async def conduct(folder: Path | None, config: Config, *, plain: bool) -> int:
    """Run or resume, then report. Returns the exit code; raises SegueError for what can be refused beforehand."""
    check_start(config)
    launch.prepare_model(config)
    check_model(config)
    folder = folder or rundir.create(config)
    rundir.write_config(folder, config)
    with open_display(plain=plain) as display:
        outcome = await launch.supervise(folder, config, display)
    await _report(folder, outcome)
    return EXIT_CODES.get(outcome.reason, 1)


async def _report(folder: Path, outcome: launch.Outcome) -> None:
    shown = _shown(folder)
    if outcome.reason not in EXIT_CODES:
        print(f"segue train: the run failed: {outcome.detail or 'see its logs'}", file=sys.stderr)
    extras = Extras(outcome.started_wall_s, outcome.peak_rss_bytes, outcome.reason or "failed")
    try:
        summary = build_summary(await read_events(folder), extras)
    except LogError as error:
        if outcome.reason in EXIT_CODES:
            print(f"segue train: no summary, because the log cannot be read: {error}", file=sys.stderr)
        return
    write_summary(folder / "summary.json", summary)
    plotted = plot_rewards(summary, folder / "reward.png")
    out = sys.stdout if outcome.reason == "completed" else sys.stderr
    peak = outcome.peak_rss_bytes / 2**30
    print(f"\n{summary['status']} after {summary['wall_s']:.0f} s, peak memory {peak:.1f} GiB", file=out)
    for key in ("reward_first", "reward_last", "reward_prompt_blind"):
        if isinstance(summary.get(key), float):
            print(f"  {key:<20} {summary[key]:.3f}", file=out)
    print(f"  summary  {shown}/summary.json\n  plot     {plotted}\n  log      segue log {shown}", file=out)
    if outcome.reason == "interrupted":
        print(f"  go on    segue train --resume {folder.name}", file=out)


def _shown(folder: Path) -> Path:
    """The folder as a person would type it here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


async def read_events(folder: Path) -> list[Recorded]:
    """The whole log of a run, wherever it is now."""
    reader = await open_reader(folder)
    try:
        events: list[Recorded] = []
        while batch := await reader.read(len(events), limit=4096):
            events.extend(batch)
        return events
    finally:
        await reader.close()


async def describe(folder: Path) -> dict[str, object]:
    """Where a run stands, as `segue status` shows it."""
    view = RunView()
    for event in await read_events(folder):
        view.apply(event)
    return {
        "run": view.run_id,
        "phase": view.stopped or view.phase,
        "step": f"{view.step} of {view.config.run.steps}",
        "reward": view.reward,
        "weight version": view.weight_version,
        "open sessions": len(view.open_sessions),
        "tokens generated": view.tokens_generated,
        "engines": {name: f"{e.state}, version {e.version}" for name, e in sorted(view.engines.items())},
        "restarts": view.restarts,
        "alarms": view.alarms,
    }


async def explain(folder: Path) -> list[Wait]:
    """Who waits for whom, as `segue status --why` shows it; of a run that ended without a last word, as of its end."""
    waits, last_wall_s = Waits(), 0.0
    reader = await open_reader(folder)
    try:
        position = 0
        while batch := await reader.read(position, limit=4096):
            for event in batch:
                waits.apply(event)
            position, last_wall_s = batch[-1].position, batch[-1].envelope.wall_s
        return waits.waits(time.time() if reader.is_live else last_wall_s)
    finally:
        await reader.close()
