"""Engines for the contract suite: the fake, and the real one on a CPU, started once for the whole session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from engines_under_test import KINDS, START_DEADLINE_S, START_VERSION, VOCAB, Engine, engine_options
from tiny_models import make_tiny_moe

from actors.engines import launch_spec
from actors.engines.http import EngineControl
from actors.engines.process import EngineProcess


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("tiny") / "moe", vocab_size=VOCAB, seed=0)


@pytest.fixture(scope="session")
def other_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("tiny") / "other", vocab_size=VOCAB, seed=1)


@pytest.fixture(scope="session", params=KINDS)
def engine_server(
    request: pytest.FixtureRequest, tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """(kind, url) of an engine that serves `tiny_moe` until the session ends."""
    kind: str = request.param
    options = engine_options(kind, tiny_moe, tmp_path_factory.mktemp(kind) / "engine.log")
    process = EngineProcess(launch_spec(kind, options), name=kind)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(process.start(deadline_s=START_DEADLINE_S))
        try:
            yield kind, options.url
        finally:
            runner.run(process.stop())


@pytest.fixture
async def engine(engine_server: tuple[str, str], tiny_moe: Path) -> AsyncIterator[Engine]:
    """The engine, resident, resumed, empty and with the weights of `tiny_moe` under START_VERSION."""
    kind, url = engine_server
    async with EngineControl(url, name=kind) as control, aiohttp.ClientSession() as http:
        await control.probe()
        try:
            yield Engine(kind, control, http)
        finally:
            await control.onload(control.released)
            await control.resume()
            await http.post(url + "/abort_request", json={"abort_all": True})
            await control.load_disk(str(tiny_moe), version=START_VERSION, flush_cache=True)
