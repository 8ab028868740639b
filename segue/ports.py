"""TCP ports of this host."""

from __future__ import annotations

import socket

from segue.errors import ConfigError


def free_port(host: str = "127.0.0.1") -> int:
    """A port on `host` that was free a moment ago; another process may take it before it is bound."""
    with _socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, key: str) -> None:
    """Raise ConfigError naming `key`, the port and the remedy if nothing can listen on it now."""
    with _socket(host) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: a closed connection does not hold it
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"{key}: cannot listen on {host}:{port} ({reason}); set {key} to a free port, or to 0 to take any"
            ) from error


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
