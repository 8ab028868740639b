"""What a trainer promises, and the plain data that goes in and out. Torch-free: actors and tests import this.

Invariants every implementation keeps:
- `step` is a function of (state, samples, seed): on a CPU equal inputs give an equal digest.
- The weights change only in `step` and `load`; `version` after a step is the version given to it plus one.
- `save` is atomic and `load` puts back everything that later steps depend on: after it, training goes on bit-equal to
  a run that never stopped (CPU).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from segue.errors import ConfigError
from segue.wire.sample import Sample

NO_OPTIONS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Everything that decides how a batch changes the weights.

    model_path: a Hugging Face folder. epochs: passes over the batch per step; minibatches: updates per pass (1 = the
    whole batch at once). micro_batch_tokens: packing budget of one forward. replay_routes: use the engines' recorded
    experts; recomputed: what becomes of rows made again by a prefill. deterministic: refuse operations that torch
    knows to vary between runs (matters on accelerators; a CPU run is deterministic anyway).
    """

    model_path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    epochs: int = 1
    minibatches: int = 1
    loss: str = "grpo"
    loss_options: Mapping[str, float] = field(default_factory=lambda: NO_OPTIONS)
    advantage: str = "group_normalised"
    micro_batch_tokens: int = 16384
    logprob_chunk: int = 1024
    replay_routes: bool = False
    recomputed: Literal["mask_loss", "replay"] = "mask_loss"
    seed: int = 0
    deterministic: bool = True

    def __post_init__(self) -> None:
        checks = {
            "lr": self.lr >= 0,
            "betas": len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "adam_eps": self.adam_eps > 0,
            "weight_decay": self.weight_decay >= 0,
            "clip_grad": self.clip_grad > 0,
            "epochs": self.epochs >= 1,
            "minibatches": self.minibatches >= 1,
            "micro_batch_tokens": self.micro_batch_tokens >= 1,
            "logprob_chunk": self.logprob_chunk >= 1,
            "dtype": self.dtype in ("float32", "bfloat16"),
            "recomputed": self.recomputed in ("mask_loss", "replay"),
        }
        for name, good in checks.items():
            if not good:
                raise ConfigError(f"trainer option {name} = {getattr(self, name)!r} is out of range")


@dataclass(frozen=True, slots=True)
class StepResult:
    """`digest`: hash of the new weights; `metrics`: averages over the step's tokens unless the name says otherwise."""

    step: int
    version: int
    digest: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says about itself. cursor: opaque text of whoever asked for the save (a log position)."""

    step: int
    version: int
    cursor: str
    digest: str


class TrainerProtocol(Protocol):
    """One policy under training. Calls are sequential; none returns before its effect is complete."""

    @property
    def version(self) -> int:
        """Version of the weights held now."""
        ...

    def renumber(self, version: int) -> None:
        """Call the weights held now `version`, higher than before: their number was given to others already."""
        ...

    def step(self, samples: Sequence[Sample], *, step: int, version: int, seed: int) -> StepResult:
        """Train on a batch with weights of `version`; raises TrainerError and leaves the state as it was if the batch
        cannot be used."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, tensor) of every weight, fused partners next to each other."""
        ...

    def digest(self) -> str:
        """Hash over names, dtypes, shapes and bytes of all weights."""
        ...

    def save(self, folder: Path, *, step: int, cursor: str) -> CheckpointInfo:
        """Write a complete checkpoint to `folder`, atomically."""
        ...

    def load(self, folder: Path) -> CheckpointInfo:
        """Put a checkpoint back; raises TrainerError if it is damaged or of another layout."""
        ...

    def close(self) -> None:
        """Give back what the trainer holds outside itself. Repeatable."""
        ...
