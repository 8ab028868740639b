"""The classes that Ray knows: they import what they run only in the actor's own process, so the driver stays small."""

from __future__ import annotations


class RolloutShell:
    """Ray actor around `actors.rollout.RolloutActor`."""

    def __init__(self, run_dir: str, engine_id: str) -> None:
        from actors.rollout import RolloutActor

        self.actor = RolloutActor(run_dir, engine_id)

    async def run(self) -> None:
        await self.actor.run()


class TrainerShell:
    """Ray actor around `actors.trainer.TrainerActor`."""

    def __init__(self, run_dir: str) -> None:
        from actors.trainer import TrainerActor

        self.actor = TrainerActor(run_dir)

    async def run(self) -> None:
        await self.actor.run()
