"""The classes that Ray knows: they import what they run only in the actor's own process, so the driver stays small."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.boot import RunContext
    from segue.log import EventLog


class RolloutShell:
    """Ray actor around `actors.rollout.RolloutActor`."""

    def __init__(self, run_dir: str, engine_id: str) -> None:
        self.ctx, self.engine_id = _come_up(run_dir, engine_id), engine_id

    async def run(self) -> None:
        from actors.rollout import RolloutActor

        await _with_log(self.ctx, RolloutActor(self.ctx, self.engine_id).run)


class TrainerShell:
    """Ray actor around `actors.trainer.TrainerActor`."""

    def __init__(self, run_dir: str) -> None:
        self.ctx = _come_up(run_dir, "trainer")

    async def run(self) -> None:
        from actors.trainer import TrainerActor

        await _with_log(self.ctx, TrainerActor(self.ctx).run)


def _come_up(run_dir: str, name: str) -> RunContext:
    from segue import boot

    boot.die_with_parent()
    ctx = boot.RunContext.load(Path(run_dir))
    boot.configure_logging(ctx.run_dir, name)
    return ctx


async def _with_log(ctx: RunContext, run: Callable[[EventLog], Awaitable[None]]) -> None:
    from segue.log import open_log

    events = await open_log(ctx)
    try:
        await run(events)
    finally:
        await events.close()
