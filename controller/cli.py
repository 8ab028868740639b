"""The commands `segue train` and `segue status`. Heavy imports come after the arguments are parsed."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from segue.config import Config
from segue.config.arguments import add_config_arguments, config_from_arguments
from segue.errors import ConfigError


def train(argv: list[str]) -> int:
    """Run a training job to its end. Exit code 0: completed; 1: failed; 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="segue train",
        description="Train a policy with RL: engines generate, environments play, the trainer learns.",
        epilog="ctrl-C stops cleanly; `segue train --resume RUN` goes on from the log and the last checkpoint.",
    )
    add_config_arguments(parser)
    parser.add_argument("--resume", metavar="RUN", help="go on with an earlier run: its id, its folder, or `last`")
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")
    options = parser.parse_args(argv)
    if options.resume:
        folder, config = _resumed(options)
    else:
        folder, config = None, config_from_arguments(options)
    from controller.report import conduct

    return asyncio.run(conduct(folder, config, plain=options.plain))


def _resumed(options: argparse.Namespace) -> tuple[Path, Config]:
    """The run's own configuration, with the overrides of this start."""
    from controller import rundir
    from segue.config import load_config

    if options.config is not None:
        raise ConfigError("--resume takes the run's own configuration; change single options with --set")
    folder = rundir.find(Path(Config().run.dir), options.resume)
    return folder, load_config(folder / rundir.CONFIG_TOML, options.overrides)


def status(argv: list[str]) -> int:
    """Say where a run stands. Exit code 0, or 1 if there is no such run."""
    parser = argparse.ArgumentParser(prog="segue status", description="Where a run stands, live or ended.")
    parser.add_argument("run", nargs="?", default="last", help="run id, run folder or `last` (default)")
    parser.add_argument("--dir", type=Path, default=Path(Config().run.dir), help="folder that holds the runs")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--why", action="store_true", help="who waits for whom, for what and since when")
    options = parser.parse_args(argv)
    from controller import rundir
    from controller.report import describe, explain

    if options.why:
        waits = asyncio.run(explain(rundir.find(options.dir, options.run)))
        if options.json:
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(waits), indent=2).decode() + "\n")
        else:
            lines = [f"{w.for_s:8.1f} s  {w.waiter} -> {w.on}: {w.what} ({w.count})\n" for w in waits]
            sys.stdout.writelines(lines or ["nobody waits\n"])
        return 0
    description = asyncio.run(describe(rundir.find(options.dir, options.run)))
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(description), indent=2).decode() + "\n")
    else:
        width = max(len(name) for name in description)
        sys.stdout.writelines(f"{name:<{width}}  {value}\n" for name, value in description.items())
    return 0
