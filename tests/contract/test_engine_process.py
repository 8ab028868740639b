"""How an engine process starts, tells why it cannot, and ends: over the fake engine and the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from engines_under_test import KINDS, START_DEADLINE_S, Engine, engine_options

from actors.engines import launch_spec
from actors.engines.process import EngineProcess
from segue.errors import EngineError

pytestmark = pytest.mark.timeout(300)


async def test_health_and_capabilities(engine: Engine) -> None:
    assert await engine.control.health()
    capabilities = await engine.control.probe()
    assert capabilities.begin_end
    assert capabilities.weight_versions
    assert capabilities.routed_experts
    await engine.control.pause("retract")
    assert await engine.control.health()


@pytest.mark.parametrize("kind", KINDS)
async def test_death_at_start_tells_why_and_leaves_nothing(kind: str, tmp_path: Path, tiny_moe: Path) -> None:
    options = engine_options(kind, tiny_moe, tmp_path / "engine.log")
    spec = launch_spec(kind, options)
    broken = type(spec)((*spec.argv, "--no-such-option"), spec.url, spec.log_file, spec.env)
    process = EngineProcess(broken, name="e7")
    with pytest.raises(EngineError, match=r"engine e7 exited with status 2[\s\S]*engine\.log[\s\S]*--no-such-option"):
        await process.start(deadline_s=START_DEADLINE_S)
    assert not process.alive
    assert not members(process.pid)


OWNER = """
import asyncio, sys
from pathlib import Path
from actors.engines import EngineOptions, LaunchSpec
from actors.engines.process import EngineProcess

async def main():
    spec = LaunchSpec(tuple(sys.argv[4:]), sys.argv[2], Path(sys.argv[3]), eval(sys.argv[1]))
    process = EngineProcess(spec, name="e0")
    await process.start(deadline_s=280)
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def members(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


async def until_gone(group: int) -> None:
    async with asyncio.timeout(10):
        while members(group):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_survives_its_owner_or_its_stop(kind: str, tmp_path: Path, tiny_moe: Path) -> None:
    spec = launch_spec(kind, engine_options(kind, tiny_moe, tmp_path / "engine.log"))
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, repr(spec.env), spec.url, str(spec.log_file), *spec.argv),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        group = int(await owner.stdout.readline())
        assert len(members(group)) >= (3 if kind == "sglang" else 1)
    finally:
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
    await until_gone(group)


async def test_stop_ends_the_process_and_is_idempotent(tmp_path: Path, tiny_moe: Path) -> None:
    options = engine_options("fake", tiny_moe, tmp_path / "engine.log")
    async with EngineProcess(launch_spec("fake", options), name="e0") as process:
        await process.start(deadline_s=30)
        assert process.alive
        with pytest.raises(EngineError, match="runs already"):
            await process.start(deadline_s=30)
        await process.stop()
        await process.stop()
        assert not process.alive
        assert await process.wait() == -signal.SIGKILL
        await process.start(deadline_s=30)
        assert process.alive
    assert not members(process.pid)


async def test_a_taken_port_is_named(tmp_path: Path, tiny_moe: Path, engine_server: tuple[str, str]) -> None:
    _, url = engine_server
    spec = launch_spec("fake", engine_options("fake", tiny_moe, tmp_path / "engine.log"))
    taken = type(spec)(spec.argv, url, spec.log_file)
    with pytest.raises(EngineError, match="something listens on"):
        await EngineProcess(taken, name="e1").start(deadline_s=5)
