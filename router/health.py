"""Asks every engine that is up whether it answers, and keeps the set of those that do not.

An engine is sick after SICK_AFTER failed probes in a row and well after one good one. A paused engine answers 503 by
design; any answer counts as good then. Whether a process is dead is for its actor to say (EngineLost): a probe only
keeps new work away from an engine that hangs.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from router.assign import Assigner
from router.state import Engine

SICK_AFTER = 2
PROBE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Prober:
    def __init__(self, assigner: Assigner, http: aiohttp.ClientSession, interval_s: float) -> None:
        self._assigner, self._http, self._interval_s = assigner, http, interval_s
        self._failures: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(self._interval_s)

    async def round(self) -> None:
        """Probe all engines at once and judge them."""
        engines = [one for one in self._assigner.state.engines.values() if one.up]
        async with asyncio.TaskGroup() as tasks:
            answers = [(one, tasks.create_task(self._answers(one))) for one in engines]
        for one, answer in answers:
            self._judge(one, answer.result())

    def _judge(self, one: Engine, well: bool) -> None:
        key = (one.engine_id, one.incarnation)  # a restarted engine starts with a clean record
        failures = 0 if well else self._failures.get(key, 0) + 1
        self._failures[key] = failures
        sick = self._assigner.sick
        if failures == SICK_AFTER:
            _log.warning("engine %s at %s does not answer its health probe", one.engine_id, one.url)
        if failures >= SICK_AFTER:
            sick.add(one.engine_id)
        else:
            sick.discard(one.engine_id)

    async def _answers(self, one: Engine) -> bool:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._http.get(f"{one.url}/health", timeout=timeout) as response:
                return response.status == 200 or (one.paused and response.status == 503)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
