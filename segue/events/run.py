"""The run as a whole: start, stop, restarts of its parts, alarms."""

from __future__ import annotations

from segue.events.base import Body, command, fact


@fact("run.started", emitter="controller", key=("run_id",), identity=("config_digest",), follows="TrainerReady")
class RunStarted(Body, frozen=True):
    """A new run begins; appended once, before anything else. `config` is the resolved configuration as JSON."""

    run_id: str
    config: str
    config_digest: str
    decide_version: int
    lineage: int
    session_servers: int
    engines: tuple[str, ...]
    start_id: str = ""


@fact("run.resumed", emitter="controller", follows="TrainerReady")
class RunResumed(Body, frozen=True):
    """The controller came back to a run that the log knows already.

    `start_id` names the supervisor's start. `whole`: it is another one than before, so every process of the run is
    new (`--resume`); otherwise only the controller is, and the others go on.
    """

    run_id: str
    config: str
    config_digest: str
    decide_version: int
    lineage: int
    restart: int
    whole: bool
    start_id: str = ""


@command("run.stop", handler="supervisor", key=("reason", "restart"), follows="RunStopped within 60 s")
class StopRun(Body, frozen=True):
    """End the run: finished, or asked for by a person."""

    reason: str
    restart: int


@fact("run.stopped", emitter="controller", follows="nothing until RunResumed")
class RunStopped(Body, frozen=True):
    """The run ended in good order. `reason`: completed | interrupted | failed; `detail` is for people."""

    reason: str
    detail: str = ""


@fact("run.alarm", emitter="any process", follows="a decision of the controller, if the kind asks for one")
class AlarmRaised(Body, frozen=True):
    """Something that should not happen: a missed deadline, a stall, a refused command."""

    kind: str
    subject: str
    detail: str


@fact("run.process_started", emitter="each service")
class ServiceReady(Body, frozen=True):
    """A service process answers at `url` from now on (`pid` on its host)."""

    service: str
    url: str
    pid: int


@fact("run.process_restarted", emitter="supervisor, actors.supervise, rollout actor")
class ProcessRestarted(Body, frozen=True):
    """A child died and its keeper started it again after `backoff_s`. `count` restarts so far in this run."""

    process: str
    count: int
    exit_code: int
    backoff_s: float


@fact("run.lineage_raised", emitter="controller", key=("lineage",), identity=("abandoned_steps",))
class LineageRaised(Body, frozen=True):
    """Re-executed steps gave other weights than recorded: their versions are abandoned, numbering goes on above."""

    lineage: int
    abandoned_steps: tuple[int, ...]
    first_version: int


@fact("run.command_dead_lettered", emitter="the command's consumer", key=("command_position", "target"), identity=())
class CommandDeadLettered(Body, frozen=True):
    """A command was delivered too often without being acknowledged and was set aside."""

    command_position: int
    target: str
    deliveries: int
    reason: str
