"""A trainer without a model: a small float32 vector that moves by a hash of everything a real step depends on.

It keeps every promise of `TrainerProtocol` in microseconds, so that crash, resume and replay of whole runs can be
tested by the thousand. Invariants: no torch; the new state is a function of (old state, samples, step, version, seed),
down to the last bit of any of them; save and load are bit-exact.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segue.errors import TrainerError
from segue.wire.sample import Sample
from training import checkpoint
from training.protocol import CheckpointInfo, StepResult, TrainerOptions

SIZE = 64
NAME = "fake.weight"


def sample_digest(sample: Sample) -> bytes:
    """SHA-256 over every field of a sample that a trainer reads."""
    whole = hashlib.sha256(
        repr((sample.sample_id, sample.rollout_id, sample.group_id, sample.reward, sample.temperature)).encode()
    )
    for array in (
        sample.tokens,
        sample.loss_mask,
        sample.logprobs,
        sample.turn_index,
        sample.version_spans,
        sample.turn_rewards,
        sample.routes,
        sample.routes_provenance,
    ):
        if array is None:
            whole.update(b"absent\n")
        else:
            whole.update(f"{array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return whole.digest()


class FakeTrainer:
    """`TrainerProtocol` in numpy; of the options only `seed` and `lr` matter."""

    def __init__(self, options: TrainerOptions) -> None:
        self._lr = options.lr
        self._state = np.random.default_rng(options.seed).standard_normal(SIZE).astype(np.float32)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def renumber(self, version: int) -> None:
        self._version = version

    def step(self, samples: Sequence[Sample], *, step: int, version: int, seed: int) -> StepResult:
        if not samples:
            raise TrainerError("a step needs at least one sample")
        if version < self._version:
            raise TrainerError(f"step {step} was asked for version {version}; the weights are at {self._version}")
        whole = hashlib.sha256(self._state.tobytes() + repr((step, version, seed)).encode())
        for sample in samples:
            whole.update(sample_digest(sample))
        noise = np.random.default_rng(int.from_bytes(whole.digest(), "big")).standard_normal(SIZE).astype(np.float32)
        self._state = (self._state + np.float32(self._lr) * noise).astype(np.float32)
        self._version = version + 1
        rewards = {sample.rollout_id: sample.reward for sample in samples}
        metrics = {
            "reward_mean": float(np.mean(list(rewards.values()))),
            "loss": float(-self._lr * np.abs(noise).mean()),
            "grad_norm": float(np.linalg.norm(noise)),
            "tokens": float(sum(int(sample.loss_mask.sum()) for sample in samples)),
            "tokens_total": float(sum(len(sample.tokens) for sample in samples)),
            "rows_replayed": 0.0,
            "rows_absent": 0.0,
            "rows_recomputed": 0.0,
        }
        for name in ("clip_fraction", "approx_kl", "entropy", "logprob_abs_diff_mean", "logprob_abs_diff_max"):
            metrics[name] = 0.0
        return StepResult(step, self._version, self.digest(), metrics)

    def named_tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield NAME, self._state

    def digest(self) -> str:
        return hashlib.sha256(f"{NAME} float32 {self._state.shape}\n".encode() + self._state.tobytes()).hexdigest()

    def _layout(self) -> checkpoint.Layout:
        return checkpoint.Layout("fake", checkpoint.parameters_hash({NAME: ("float32", (SIZE,))}))

    def save(self, folder: Path, *, step: int, cursor: str) -> CheckpointInfo:
        info = CheckpointInfo(step, self._version, cursor, self.digest())
        buffer = io.BytesIO()
        np.save(buffer, self._state, allow_pickle=False)
        checkpoint.write(folder, {"state.npy": buffer.getvalue()}, self._layout(), info)
        return info

    def load(self, folder: Path) -> CheckpointInfo:
        files, info = checkpoint.read(folder, self._layout())
        self._state = np.load(io.BytesIO(files["state.npy"]), allow_pickle=False)
        self._version = info.version
        return info

    def close(self) -> None: ...
