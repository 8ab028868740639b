"""Training steps, checkpoints, evaluations."""

from __future__ import annotations

from segue.events.base import Body, command, fact


@fact("step.trainer_ready", emitter="trainer actor", follows="a sync if an engine holds another version")
class TrainerReady(Body, frozen=True):
    """A trainer process is up and holds `version` after `step` steps: fresh, from a checkpoint, or re-executed."""

    incarnation: str
    kind: str
    step: int
    version: int
    digest: str
    start_s: float
    checkpoint: str = ""


@command("step.train", handler="trainer actor", key=("lineage", "step"), follows="StepPlanned, then StepFinished")
class TrainStep(Body, frozen=True):
    """Train step `step` (from 1) on these samples, all of them. `version`: of the weights before it."""

    lineage: int
    step: int
    version: int
    sample_ids: tuple[str, ...]
    frame_digests: tuple[str, ...]
    seed: int


@command("step.save_checkpoint", handler="trainer actor", key=("lineage", "step"), follows="CheckpointCommitted")
class SaveCheckpoint(Body, frozen=True):
    lineage: int
    step: int


@command("step.evaluate", handler="session servers", key=("evaluation",), follows="EvaluationFinished")
class Evaluate(Body, frozen=True):
    """Announce an evaluation over eval groups [first_group, end_group) with the weights `version`."""

    evaluation: int
    step: int
    version: int
    first_group: int
    end_group: int


@fact(
    "step.planned",
    emitter="trainer actor",
    key=("lineage", "step"),
    identity=("sample_ids", "seed"),
    follows="StepFinished",
)
class StepPlanned(Body, frozen=True):
    """The trainer holds the samples and is about to train on exactly these."""

    lineage: int
    step: int
    sample_ids: tuple[str, ...]
    frame_digests: tuple[str, ...]
    seed: int


@fact(
    "step.finished",
    emitter="trainer actor",
    key=("lineage", "step"),
    identity=("version", "digest"),
    follows="SyncWeights",
)
class StepFinished(Body, frozen=True):
    """The optimizer stepped: weights `version` with `digest` exist in the trainer. `busy_s`: time spent in passes."""

    lineage: int
    step: int
    version: int
    digest: str
    metrics: dict[str, float]
    started_wall_s: float
    busy_s: float


@fact("step.checkpoint_committed", emitter="trainer actor", key=("lineage", "step"), identity=("version", "digest"))
class CheckpointCommitted(Body, frozen=True):
    """Everything up to `step` is safe on disk at `path`; leases of its samples end, cursors move."""

    lineage: int
    step: int
    version: int
    digest: str
    path: str
    took_s: float


@fact("step.evaluation_finished", emitter="controller", key=("evaluation",), identity=("reward_mean",))
class EvaluationFinished(Body, frozen=True):
    evaluation: int
    step: int
    version: int
    episodes: int
    failed: int
    reward_mean: float
