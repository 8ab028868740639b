"""How a process of a run comes up: where it finds the run, how it dies with its parent, and the `segue` command.

Each process gets one argument, the run's folder. In it `config.json` is the resolved configuration and
`endpoints.json` says where everything listens; both are written by the supervisor before the first child starts.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import msgspec

from segue.config.schema import Config
from segue.errors import ConfigError, SegueError

PACKAGES = ("segue", "controller", "session_server", "router", "actors", "training", "debugger")
_PR_SET_PDEATHSIG = 1


class Endpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses and secrets of a run; the file is readable by its owner only."""

    log_url: str
    router_url: str
    session_urls: tuple[str, ...]
    ray_address: str
    ray_temp_dir: str
    admin_token: str
    worker_token: str
    start_id: str = ""
    """Names this start of the run's processes; new at every start of the supervisor."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything a child process needs to know of its run."""

    run_id: str
    run_dir: Path
    config: Config
    endpoints: Endpoints

    @property
    def blob_dir(self) -> Path:
        return self.run_dir / "blobs"

    @classmethod
    def load(cls, run_dir: Path) -> RunContext:
        try:
            config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=Config)
            endpoints = msgspec.json.decode((run_dir / "endpoints.json").read_bytes(), type=Endpoints)
        except FileNotFoundError as error:
            raise ConfigError(f"{run_dir} is not a run: {error.filename} is missing") from error
        return cls(run_dir.name, run_dir, config, endpoints)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when its parent dies (also usable as a preexec_fn)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def check_origins() -> None:
    """Refuse to run if a foreign package shadows one of ours: some of the names are common words."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise ConfigError(
                f"package '{name}' comes from {origin}, not from {home}: another installed distribution or a folder "
                f"on PYTHONPATH shadows it; remove it or start segue from its own environment"
            )


def configure_logging(run_dir: Path | None, name: str) -> None:
    """One line per record: time, process, level, logger, message; to runs/<id>/logs/<name>.log or to stderr."""
    handler: logging.Handler
    if run_dir is None:
        handler = logging.StreamHandler()
    else:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(run_dir / "logs" / f"{name}.log")
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def run_service(name: str, run_dir: Path, main: Callable[[RunContext], Coroutine[object, object, None]]) -> int:
    """Run a service's `main` until it returns, fails, or SIGTERM/SIGINT cancels it. Returns the exit code."""
    die_with_parent()
    configure_logging(run_dir, name)
    log = logging.getLogger(name)

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
        try:
            await main(RunContext.load(run_dir))
        except asyncio.CancelledError:
            return 0
        except BaseExceptionGroup as group:
            log.error("failed", exc_info=group)
            return 1
        except SegueError as error:
            log.error("failed", exc_info=error)
            return 1
        return 0

    return asyncio.run(guarded())


def main(argv: list[str] | None = None) -> int:
    """The `segue` command: finds its sub-commands in the entry-point group `segue.commands`."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {e.name: e for e in importlib.metadata.entry_points(group="segue.commands")}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: segue COMMAND ...\n\ncommands: {', '.join(sorted(commands))}\n\nsegue COMMAND --help says more")
        return 0 if arguments else 2
    entry = commands.get(arguments[0])
    if entry is None:
        print(f"segue: no command '{arguments[0]}'; there are: {', '.join(sorted(commands))}", file=sys.stderr)
        return 2
    try:
        check_origins()
        return int(entry.load()(arguments[1:]) or 0)
    except SegueError as error:
        print(f"segue {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
