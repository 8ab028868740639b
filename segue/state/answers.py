"""Which facts answer which commands, and what a command and its answer have in common."""

from __future__ import annotations

from segue.events import engine, offload, step, weights, work
from segue.events.base import Body

ANSWERS: dict[type[Body], tuple[type[Body], ...]] = {
    work.OpenAdmission: (work.AdmissionOpened,),
    work.CloseAdmission: (work.AdmissionClosed,),
    engine.PauseEngines: (engine.EnginePaused,),
    engine.ResumeEngines: (engine.EngineResumed,),
    step.TrainStep: (step.StepFinished,),
    step.SaveCheckpoint: (step.CheckpointCommitted,),
    weights.SyncWeights: (weights.WeightsSynced, weights.SyncFailed),
    offload.Release: (offload.Released,),
    offload.Onload: (offload.Onloaded,),
}


def about_of(body: Body) -> tuple[object, ...]:
    """What a command and its answer have in common."""
    match body:
        case work.OpenAdmission() | work.AdmissionOpened():
            return ("admission", body.admission)
        case work.CloseAdmission() | work.AdmissionClosed():
            return ("close", body.pause)
        case engine.PauseEngines() | engine.EnginePaused():
            return ("pause", body.pause, body.engine_id)
        case engine.ResumeEngines() | engine.EngineResumed():
            return ("resume", body.pause, body.engine_id)
        case step.TrainStep() | step.StepFinished():
            return ("train", body.step)
        case step.SaveCheckpoint() | step.CheckpointCommitted():
            return ("save", body.step)
        case weights.SyncWeights() | weights.WeightsSynced() | weights.SyncFailed():
            return ("sync", body.sync)
        case offload.Release() | offload.Released():
            return ("release", body.owner, body.incarnation, body.move)
        case offload.Onload() | offload.Onloaded():
            return ("onload", body.owner, body.incarnation, body.move)
    return ()


ANSWERING = tuple({kind for kinds in ANSWERS.values() for kind in kinds})
