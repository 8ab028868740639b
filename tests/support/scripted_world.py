"""A scripted world that answers the controller's commands with facts, in memory and without time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from controller.decide import DECIDE_VERSION, Issue, decide
from segue.config.schema import Checkpoint, Config, Engine, Evaluation, Rollout, Run, SessionServer
from segue.events import engine, offload, run, sample, step, turn, weights, work
from segue.events.base import Body, Bulk, Envelope
from segue.events.codec import Recorded
from segue.ids import EventId
from segue.state import RunState


def small_config(**rollout: object) -> Config:
    return Config(
        run=Run(steps=3),
        engine=Engine(count=2),
        rollout=Rollout(groups_per_step=2, group_size=2, extra_groups=1, **rollout),  # type: ignore[arg-type]
        session_server=SessionServer(count=2),
        evaluation=Evaluation(groups=1, group_size=2),
        checkpoint=Checkpoint(every=2),
    )


class World:
    """Log plus everything that answers. `pump()` plays until nothing more happens."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.log: list[Recorded] = []
        self.keys: set[str] = set()
        self.seq = 0
        self.state = RunState()
        self.open_turns: dict[str, str] = {}
        self.version = 0
        self.started: set[str] = set()
        self.on_command: Callable[[Body], bool] = lambda body: True
        engines = tuple(f"engine-{i}" for i in range(config.engine.count))
        self.append(
            run.RunStarted("r", msgspec.json.encode(config).decode(), "d", DECIDE_VERSION, 1, 2, engines), "controller"
        )

    def append(self, body: Body, producer: str = "world") -> None:
        key = body.logical_key()
        if key is not None:
            if key in self.keys:
                return
            self.keys.add(key)
        self.seq += 1
        raw = msgspec.Raw(msgspec.json.encode(body))
        envelope = Envelope(EventId("r", producer, 1, self.seq), body.SPEC.name, body.SPEC.version, self.seq, 0.0, raw)
        event = Recorded(len(self.log) + 1, envelope, body)
        self.log.append(event)
        self.state.apply(event)

    def boot(self) -> None:
        for service in self.state.admission_services():
            self.append(run.ServiceReady(service, f"http://{service}", 1))
        for engine_id in self.state.engine_ids:
            self.append(engine.EngineStarted(engine_id, "i1", f"http://{engine_id}", "fake", 0, "c0", 0.1))
        self.append(step.TrainerReady("t1", "fake", 0, 0, "d0", 0.1))

    def pump(self, limit: int = 500) -> None:
        """Decide, append, answer, until the controller has nothing more to say."""
        for _ in range(limit):
            decisions = decide(self.state)
            if not decisions:
                return
            for decision in decisions:
                if isinstance(decision, Issue):
                    self.append(decision.command, "controller")
                    if self.on_command(decision.command):
                        self.answer(decision.command)
                else:
                    self.append(decision.fact, "controller")
        raise AssertionError("the controller never comes to rest")

    def answer(self, body: Body) -> None:
        match body:
            case work.OpenAdmission():
                for service in self.state.admission_services():
                    self.append(work.AdmissionOpened(body.admission, service))
                self.play(body)
            case work.CloseAdmission():
                for service in self.state.admission_services():
                    self.append(work.AdmissionClosed(body.pause, service))
            case turn.AbortTurns():
                for request in list(self.state.open_requests):
                    self.append(turn.TurnInterrupted("s", "t", request, "engine-0", 3, None, "x"))
            case engine.PauseEngines():
                self.append(engine.EnginePaused(body.pause, body.engine_id, body.mode, "retract", 0.003))
            case step.TrainStep():
                self.append(step.StepPlanned(body.lineage, body.step, body.sample_ids, body.frame_digests, body.seed))
                self.version = body.version + 1
                done = step.StepFinished(body.lineage, body.step, self.version, f"d{body.step}", {}, 0.0, 0.0)
                self.append(done)
            case weights.SyncWeights():
                names = tuple(e.engine_id for e in body.engines)
                self.append(weights.WeightsSynced(body.sync, body.version, "d", names, 1, 0.1, True))
            case engine.ResumeEngines():
                self.append(engine.EngineResumed(body.pause, body.engine_id, body.version))
            case offload.Release() | offload.Onload():
                fact = offload.Released if isinstance(body, offload.Release) else offload.Onloaded
                self.append(fact(body.pause, body.owner, body.incarnation, body.move, body.tags, 0, 0, 0, 0))
            case step.SaveCheckpoint():
                self.append(step.CheckpointCommitted(1, body.step, self.version, "d", f"step-{body.step}", 0.1))

    def play(self, admission: work.OpenAdmission) -> None:
        """Finish every rollout of the range but those of its last training group, which stays in an open turn."""
        held = admission.end_group - 1 if admission.purpose == "train" else -1
        for group in range(admission.first_group, admission.end_group):
            for member in range(admission.group_size):
                name = f"{admission.purpose}-{group}-{member}"
                if name in self.started and group == held:
                    continue
                if group == held:
                    self.started.add(name)
                    self.append(turn.TurnStarted(f"s-{name}", "t0", f"req-{name}", "engine-0", 4), "session-0")
                else:
                    self.finish(admission.purpose, group, member)

    def finish(self, purpose: str, group: int, member: int) -> None:
        name = f"{purpose}-{group}-{member}"
        ready = sample.SampleReady(
            name, name, f"s-{name}", purpose, group, member, 0.5, 10, 4, 2, 0, self.version, self.version,
            Bulk("d" * 64, 10), f"f-{name}",
        )  # fmt: skip
        self.append(ready)

    def names(self) -> list[str]:
        return [e.envelope.type for e in self.log]

    def bodies[B: Body](self, kind: type[B]) -> list[B]:
        return [e.body for e in self.log if isinstance(e.body, kind)]
