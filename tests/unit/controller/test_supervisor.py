"""The keeper of processes: restarts with a back-off, gives up with a reason, leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from controller.supervisor import MAX_RAPID_DEATHS, ChildSpec, Supervisor, last_line
from segue.errors import ProcessError


async def ignore(name: str, count: int, code: int, backoff_s: float) -> None:
    return None


def spec(tmp_path: Path, code: str, name: str = "child", **options: bool) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), tmp_path / f"{name}.log", **options)


async def until(condition: object, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "condition not met in time"
        await asyncio.sleep(0.02)


async def test_a_killed_child_is_started_again_and_reported(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    async def restarted(name: str, count: int, code: int, backoff_s: float) -> None:
        seen.append((name, count, code))

    supervisor = Supervisor(restarted)
    async with asyncio.TaskGroup() as group:
        child = supervisor.start(spec(tmp_path, "import time; time.sleep(60)"), group)
        await until(lambda: child.process is not None)
        assert child.process is not None
        first = child.process.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.process is not None and child.process.pid != first)
        await supervisor.stop()
    assert seen == [("child", 1, -signal.SIGKILL)]
    assert child.process is not None
    assert child.process.returncode is not None


async def test_a_child_that_keeps_dying_ends_with_its_last_words(tmp_path: Path) -> None:
    class Hurried:
        def wall_s(self) -> float:
            return time.time()

        def mono_s(self) -> float:
            return time.monotonic()

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(0)

    supervisor = Supervisor(ignore, Hurried())
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            supervisor.start(spec(tmp_path, "raise SystemExit('port 80 is taken')"), group)
    error = caught.value.exceptions[0]
    assert isinstance(error, ProcessError)
    assert "port 80 is taken" in str(error)
    assert supervisor.restart_counts() == {"child": MAX_RAPID_DEATHS - 1}


async def test_a_child_that_may_end_is_left_alone_after_exit_code_zero(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore)
    async with asyncio.TaskGroup() as group:
        supervisor.start(spec(tmp_path, "pass", ends_well=True), group)
    assert supervisor.restart_counts() == {"child": 0}


async def test_stop_ends_a_child_that_ignores_sigterm_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.supervisor.TERM_WAIT_S", 0.3)
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal,time; signal.signal(15, 1); time.sleep(60)'])\n"
        "print(p.pid, flush=True); time.sleep(60)\n"
    )
    supervisor = Supervisor(ignore)
    log = tmp_path / "child.log"
    async with asyncio.TaskGroup() as group:
        supervisor.start(spec(tmp_path, code), group)
        await until(lambda: log.exists() and last_line(log).isdigit())
        grandchild = int(last_line(log))
        await supervisor.stop()
    await until(lambda: not psutil.pid_exists(grandchild))


def test_children_die_with_the_supervisor(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from controller.supervisor import ChildSpec, Supervisor\n"
        "async def ignore(*a): pass\n"
        "async def main():\n"
        "    async with asyncio.TaskGroup() as g:\n"
        f"        argv, log = (sys.executable, '-c', 'import time; time.sleep(60)'), Path({str(tmp_path)!r}) / 'c'\n"
        "        c = Supervisor(ignore).start(ChildSpec('c', argv, log), g)\n"
        "        while c.process is None: await asyncio.sleep(0.01)\n"
        "        print(c.process.pid, flush=True)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        assert psutil.pid_exists(child)
        owner.kill()
        owner.wait(10)
        deadline = time.monotonic() + 5
        while psutil.pid_exists(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not psutil.pid_exists(child)


async def test_kill_ends_everything_at_once(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    async with asyncio.TaskGroup() as group:
        children = [supervisor.start(spec(tmp_path, code, name=f"c{i}"), group) for i in range(2)]
        for child in children:
            await child.started.wait()
        supervisor.kill()
    assert all(child.process is not None and not psutil.pid_exists(child.process.pid) for child in children)
