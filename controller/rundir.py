"""A run's folder: made once, found again by `--resume`.

runs/<id>/config.toml      resolved configuration, for people and for --resume
          config.json      the same, for the run's processes
          endpoints.json   addresses and secrets, readable by the owner only; new at every start
          log/             the log server's data
          blobs/ logs/ checkpoints/ weights/
          summary.json reward.png
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import msgspec

from segue.boot import Endpoints, RunContext
from segue.config.printing import print_config
from segue.config.schema import Config
from segue.errors import ConfigError
from segue.ports import check_port, free_port

CONFIG_TOML = "config.toml"


def create(config: Config) -> Path:
    """A fresh folder for a new run, with its resolved configuration in it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.run.dir) / f"{config.run.name}-{stamp}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make {folder}: {error.strerror}") from error
    write_config(folder, config)
    return folder.resolve()


def write_config(folder: Path, config: Config) -> None:
    """Write down what the run's processes read; done at every start, because --resume may change options."""
    # For the owner only: log.url may hold a password.
    _write(folder / CONFIG_TOML, print_config(config).encode())
    _write(folder / "config.json", msgspec.json.encode(config))


def find(runs: Path, name: str) -> Path:
    """The folder of an earlier run: its id, its path, or `last` for the newest."""
    if name == "last":
        known = sorted((p for p in runs.glob("*/config.json")), key=lambda p: p.stat().st_mtime)
        if not known:
            raise ConfigError(f"--resume last: there is no run under {runs}")
        return known[-1].parent.resolve()
    for folder in (Path(name), runs / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(f"there is no run '{name}' under {runs} (it would hold a config.json)")


def open_endpoints(folder: Path, config: Config, log_url: str) -> RunContext:
    """Choose the addresses and secrets of this start and write them down for the children."""
    server, router = config.session_server, config.router
    ports = [server.port + i if server.port else free_port(server.host) for i in range(server.count)]
    for i, port in enumerate(ports):
        check_port(server.host, port, "session_server.port" if i == 0 else f"session_server.port + {i}")
    router_port = router.port or free_port(router.host)
    check_port(router.host, router_port, "router.port")
    ray_port = free_port("127.0.0.1")
    endpoints = Endpoints(
        log_url=log_url,
        router_url=f"http://{router.host}:{router_port}",
        session_urls=tuple(f"http://{server.host}:{port}" for port in ports),
        ray_address=config.ray.address or f"127.0.0.1:{ray_port}",
        # Short, because sockets live below it and their paths are limited to 107 bytes.
        ray_temp_dir=f"/tmp/segue-ray-{secrets.token_hex(4)}",
        admin_token=secrets.token_urlsafe(24),
        worker_token=secrets.token_urlsafe(24),
        start_id=secrets.token_hex(8),
    )
    _write(folder / "endpoints.json", msgspec.json.encode(endpoints))
    return RunContext.load(folder)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
