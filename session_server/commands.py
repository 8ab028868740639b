"""The command stream of one session server: close admission, take turns off the engines, open admission.

Invariants: a command is acknowledged when its effect stands in the log; one that was carried out before a restart is
only acknowledged again; a command that a restart after restart could not carry out is set aside, and that is a fact.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from segue.config.schema import Config
from segue.errors import EngineUnavailable
from segue.events.base import Body
from segue.events.run import CommandDeadLettered
from segue.events.step import Evaluate
from segue.events.turn import AbortTurns
from segue.events.work import AdmissionClosed, AdmissionOpened, CloseAdmission, OpenAdmission
from segue.log.protocol import Delivery, EventLog
from session_server.engine_client import EngineClient
from session_server.facts import Facts
from session_server.pause import Gate, Running, RunningRequest
from session_server.work import Work

MAX_DELIVERIES = 5
ABORT_AGAIN_S = 0.5
COMMAND_WAIT_S = 5.0
"""An abort that overtook its own request had no effect: it is sent again until the request is back."""
_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Commands:
    """`last_pause`, `last_admission`: highest numbers carried out, from the log."""

    service: str
    config: Config
    log: EventLog
    facts: Facts
    gate: Gate
    running: Running
    work: Work
    engines: EngineClient
    last_pause: int
    last_admission: int

    async def consume(self) -> None:
        """Carry out commands, one after another, for ever."""
        while True:
            for delivery in await self.log.receive(self.service, self.service, wait_s=COMMAND_WAIT_S):
                await self._deliver(delivery)

    async def _deliver(self, delivery: Delivery) -> None:
        body, position = delivery.event.body, delivery.event.position
        if body is None or delivery.deliveries > MAX_DELIVERIES:
            reason = "unknown command" if body is None else f"delivered {delivery.deliveries} times"
            await self.facts.append(
                CommandDeadLettered(
                    command_position=position, target=self.service, deliveries=delivery.deliveries, reason=reason
                )
            )
            await self.log.bury(self.service, position, reason)
            return
        await self.handle(body)
        await self.log.acknowledge(self.service, [position])

    async def handle(self, body: Body) -> None:
        match body:
            case CloseAdmission():
                await self._close(body)
            case AbortTurns():
                await self._abort(body)
            case OpenAdmission():
                await self._open(body)
            case Evaluate():
                pass  # for information: its rollouts are opened by OpenAdmission
            case _:
                _logger.warning("%s is no command for a session server", body.SPEC.name)

    async def _close(self, command: CloseAdmission) -> None:
        if command.pause <= self.last_pause:
            return
        self.last_pause = command.pause
        self.gate.close(command.pause)
        self.work.close()
        # Queued after every TurnStarted of a request that got through the gate: from this fact on there is none.
        await self.facts.append(AdmissionClosed(pause=command.pause, service=self.service))

    async def _open(self, command: OpenAdmission) -> None:
        if command.admission <= self.last_admission:
            return
        self.last_admission = command.admission
        await self.facts.append(AdmissionOpened(admission=command.admission, service=self.service))
        self.work.open(command)
        self.gate.open()

    async def _abort(self, command: AbortTurns) -> None:
        if self.gate.pause != command.pause:
            return  # that pause is over: whatever runs now belongs to a later time
        requests = self.running.all()
        if not command.keep_partial:
            await _all_settled(requests, command.drain_s)
        for request in requests:
            request.cut = "keep" if command.keep_partial else "drop"
        deadline_s = self.config.rollout.pause_deadline_s
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(self._take_off(request))
        except TimeoutError:
            _logger.warning("requests not given back within %g s are dropped", deadline_s)
        stuck = [request for request in requests if not request.settled.is_set()]
        for request in stuck:
            if request.limit is not None:
                request.limit.reschedule(asyncio.get_running_loop().time())
        await _all_settled(stuck, deadline_s)

    async def _take_off(self, request: RunningRequest) -> None:
        while not request.settled.is_set():
            try:
                await self.engines.abort(request.url, request.request_id)
            except EngineUnavailable as error:
                _logger.warning("abort of %s: %s", request.request_id, error)
            await _all_settled([request], ABORT_AGAIN_S)


async def _all_settled(requests: list[RunningRequest], deadline_s: float) -> None:
    """Until all are settled or the time is up."""
    try:
        async with asyncio.timeout(deadline_s):
            for request in requests:
                await request.settled.wait()
    except TimeoutError:
        return
