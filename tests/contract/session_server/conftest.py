"""The session server's rig; its `engine` stands in for the one of the engines' own suite in here."""

from __future__ import annotations

from session_server_rig import engine, model, rig_of, slow_engine

__all__ = ["engine", "model", "rig_of", "slow_engine"]
