"""The session server's rig; its `engine` stands in for the one of the engines' own suite in here."""

from __future__ import annotations

import pytest
from real_engine_rig import real_engine
from session_server_rig import engine, model, rig_of, slow_engine
from spoken_engine import write_spelling_model

__all__ = ["engine", "model", "rig_of", "slow_engine", "spelling"]


@pytest.fixture(scope="session")
def spelling(tmp_path_factory):
    """A model that spells byte by byte and shows tools."""
    return write_spelling_model(tmp_path_factory.mktemp("spelling"))


@pytest.fixture(scope="session")
def sglang(tmp_path_factory):
    """The real engine, started once for all tests here that need it."""
    with real_engine(tmp_path_factory.mktemp("sglang")) as engine:
        yield engine
