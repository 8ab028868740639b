"""The only Ray driver: creates the actors of a run and creates a dead one again.

Ray places and kills; it restarts nothing (`max_restarts=0`) and nothing is detached, so the end of this process ends
every actor. An actor that keeps dying right after its start ends the run with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from actors.shells import RolloutShell, TrainerShell
from segue import boot
from segue.boot import RunContext
from segue.errors import ProcessError
from segue.events import run
from segue.log import Writer, open_log

log = logging.getLogger("actors.supervise")

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.2, 10.0
HEALTHY_AFTER_S = 60.0
MAX_RAPID_DEATHS = 6
CONNECT_DEADLINE_S = 90.0

Create = Callable[[], ActorHandle[Any]]


async def main(ctx: RunContext) -> None:
    await _connect(ctx)
    events = await open_log(ctx)
    try:
        async with await Writer.open(events, "supervise") as writer, asyncio.TaskGroup() as group:
            await writer.append(run.ServiceReady("supervise", ctx.endpoints.ray_address, os.getpid()))
            for name, create in _actors(ctx).items():
                group.create_task(_keep(name, create, writer), name=f"keep-{name}")
    finally:
        ray.shutdown()
        await events.close()


def _actors(ctx: RunContext) -> dict[str, Create]:
    folder = str(ctx.run_dir)
    gpus = ctx.config.engine.device != "cpu" and _has_gpu()
    share = 0.45 if gpus else 0.0
    options: dict[str, Any] = {
        "max_restarts": 0,
        "num_cpus": 0.1,
        "num_gpus": share,
        "runtime_env": {"env_vars": _actor_environment(gpus)},
    }
    rollout = ray.remote(RolloutShell)
    trainer = ray.remote(TrainerShell)

    def create_engine(engine_id: str) -> ActorHandle[Any]:
        return rollout.options(**options, name=f"{ctx.run_id}-{engine_id}").remote(folder, engine_id)

    def create_trainer() -> ActorHandle[Any]:
        return trainer.options(**options, name=f"{ctx.run_id}-trainer").remote(folder)

    engines = [f"engine-{i}" for i in range(ctx.config.engine.count)]
    return {**{e: functools.partial(create_engine, e) for e in engines}, "trainer": create_trainer}


def _has_gpu() -> bool:
    return bool(ray.cluster_resources().get("GPU", 0))


def _actor_environment(gpus: bool) -> dict[str, str]:
    """One compute thread each: on few cores more threads spin against each other. No compiler at the first step."""
    shared = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return shared if gpus else {**shared, "OMP_NUM_THREADS": "1"}


async def _connect(ctx: RunContext) -> None:
    """Join the cluster, which may still be starting."""
    deadline = asyncio.get_running_loop().time() + CONNECT_DEADLINE_S
    host, _, port = ctx.endpoints.ray_address.rpartition(":")
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                pass
            await asyncio.to_thread(_init, ctx)
            return
        except (OSError, ConnectionError, RayError, ValueError, RuntimeError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ProcessError(
                    f"Ray at {ctx.endpoints.ray_address} did not answer in {CONNECT_DEADLINE_S:.0f} s: {error} "
                    f"(see {ctx.run_dir}/logs/ray.log, or set [ray] address)"
                ) from error
            await asyncio.sleep(0.3)


def _init(ctx: RunContext) -> None:
    ray.init(
        address=ctx.endpoints.ray_address,
        namespace=ctx.run_id,
        log_to_driver=False,
        include_dashboard=False,
        configure_logging=False,
    )


async def _keep(name: str, create: Create, writer: Writer) -> None:
    deaths, rapid = 0, 0
    while True:
        born_s = writer.clock.mono_s()
        actor = create()
        reason = "it returned"
        try:
            await actor.run.remote()
        except (RayActorError, RayError) as error:
            reason = _first_line(error)
        finally:
            ray.kill(actor)
        deaths += 1
        rapid = 1 if writer.clock.mono_s() - born_s > HEALTHY_AFTER_S else rapid + 1
        log.warning("actor %s ended: %s", name, reason)
        if rapid >= MAX_RAPID_DEATHS:
            await writer.append(run.AlarmRaised("fatal", name, f"died {rapid} times right after its start: {reason}"))
        backoff_s = min(BACKOFF_FIRST_S * 2 ** (rapid - 1), BACKOFF_LAST_S)
        await writer.append(run.ProcessRestarted(name, deaths, -1, backoff_s))
        await asyncio.sleep(backoff_s)


def _first_line(error: BaseException) -> str:
    """Ray's errors carry whole tracebacks; the cause is the last line, or the first where there is no traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in str(error) or "ray::" in lines[0] else lines[0]


def cli(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m actors.supervise", description="Creates and keeps a run's actors.")
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    # A Ray driver under `uv run` would build a second environment for its workers.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    return boot.run_service("supervise", options.run_dir, main)


if __name__ == "__main__":
    raise SystemExit(cli())
