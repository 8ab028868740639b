"""Inference engines as child processes: how each kind is started, watched, controlled over HTTP and ended.

It owns the engine process and its control endpoints; it never generates for a session (session servers talk to the
engine directly) and never imports ray, torch or an engine. Every kind speaks SGLang's HTTP surface, so one kind is no
more than a way to build a command line.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.engines.options import EngineOptions, LaunchSpec
from segue.errors import ConfigError

__all__ = ["ENGINE_KINDS", "EngineOptions", "LaunchSpec", "launch_spec"]


def _sglang(options: EngineOptions) -> LaunchSpec:
    from actors.engines.sglang import launch_spec

    return launch_spec(options)


def _fake(options: EngineOptions) -> LaunchSpec:
    from actors.engines.fake import launch_spec

    return launch_spec(options)


_FACTORIES: dict[str, Callable[[EngineOptions], LaunchSpec]] = {"sglang": _sglang, "fake": _fake}
ENGINE_KINDS = tuple(sorted(_FACTORIES))


def launch_spec(kind: str, options: EngineOptions) -> LaunchSpec:
    """The command that starts an engine of `kind`; ConfigError names the kinds there are."""
    if kind not in _FACTORIES:
        raise ConfigError(f"unknown engine kind {kind!r}; choose one of {', '.join(ENGINE_KINDS)}")
    return _FACTORIES[kind](options)
