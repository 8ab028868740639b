"""The training sample: one rollout's tokens with everything the trainer needs, as plain numpy arrays.

Invariants: all per-token arrays have the same length n; a token with `loss_mask == 0` has `logprobs == 0.0` and
`turn_index == -1`; every token with `loss_mask == 1` lies in exactly one version span; `routes` has n - 1 rows,
because the last token was never fed to the model; a `mask` has n tokens, each within the set it was chosen from, and
one outside the loss is its own only choice. `sample_to_frame` and `sample_from_frame` both prove them.

The arrays of a frame and its bytes are frozen (tests/golden/frames): a later field (so far: the mask) is left out of
the frame unless its writer asks for it, so that readers of today get the same bytes; and a frame that has it is refused
to a reader who does not ask for it, because log-probs over a kept set mean something else without that set.

A rollout whose session branched has several samples, which go on as one: `samples_to_bundle` puts their frames into one
frame of kind "samples", and a single one stays what it is. So whoever counts rollouts, stores or names a frame needs
not know; only who trains unpacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from segue.errors import CodecError
from segue.wire.frame import decode_frame, encode_frame, payload_digest
from segue.wire.mask import SamplingMask

ROW_DECODED, ROW_RECOMPUTED, ROW_ABSENT = 0, 1, 2
"""Provenance of a route row: recorded when its token was fed, re-made by a later prefill, or not there at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One leaf of a finished session.

    tokens: int32[n]; loss_mask: uint8[n] (1: sampled by the policy and trains); logprobs: float32[n], natural log,
    at `temperature`, as the engine reported them (with a mask: renormalised over what was kept); turn_index: int32[n],
    the turn a sampled token belongs to, else -1; version_spans: int32[k, 3] rows (start, end, weight version),
    ascending, half-open; turn_rewards: float32[turns], NaN where a turn has no reward of its own; reward: scalar of
    the whole rollout.
    routes: uint8 or uint16 [n - 1, layers, top_k] or None; routes_provenance: uint8[n - 1] of ROW_* or None.
    mask: what each token was chosen from, None where the run does not cut its sampling.
    """

    sample_id: str
    rollout_id: str
    session_id: str
    group_id: str
    member: int
    reward: float
    temperature: float
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    turn_index: NDArray[np.int32]
    version_spans: NDArray[np.int32]
    turn_rewards: NDArray[np.float32]
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    routes_provenance: NDArray[np.uint8] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    mask: SamplingMask | None = None


FRAME_KIND, BUNDLE_KIND = "sample", "samples"

_REQUIRED: dict[str, tuple[type[np.generic], int]] = {
    "tokens": (np.int32, 1),
    "loss_mask": (np.uint8, 1),
    "logprobs": (np.float32, 1),
    "turn_index": (np.int32, 1),
    "version_spans": (np.int32, 2),
    "turn_rewards": (np.float32, 1),
}
"""Pinned dtype and number of dimensions of each array, in the order in which they lie in the frame."""
_ROUTES = ("routes", "routes_provenance")
_MASK = ("mask_ids", "mask_offsets")


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of a sample frame. `digest`: sha256 of the bytes of all arrays, one after another."""

    sample_id: str
    rollout_id: str
    session_id: str
    group_id: str
    member: int
    reward: float
    temperature: float
    metadata: dict[str, str]
    digest: str


def sample_to_frame(sample: Sample, *, with_mask: bool = False) -> bytes:
    """The sample as frame bytes; equal samples give equal bytes. Raises CodecError naming the broken invariant.

    with_mask: also its mask, if it has one.
    """
    check_sample(sample)
    arrays: dict[str, NDArray[Any]] = {name: getattr(sample, name) for name in _REQUIRED}
    if sample.routes is not None and sample.routes_provenance is not None:
        arrays |= {"routes": sample.routes, "routes_provenance": sample.routes_provenance}
    if with_mask and sample.mask is not None:
        arrays |= dict(zip(_MASK, (sample.mask.ids, sample.mask.offsets), strict=True))
    header = _Fields(
        sample.sample_id,
        sample.rollout_id,
        sample.session_id,
        sample.group_id,
        sample.member,
        sample.reward,
        sample.temperature,
        dict(sorted(sample.metadata.items())),
        payload_digest(arrays.values()),
    )
    return encode_frame(FRAME_KIND, msgspec.structs.asdict(header), arrays)


def sample_from_frame(data: bytes | memoryview, *, verify: bool = True, with_mask: bool = False) -> Sample:
    """The sample in a frame; its arrays are read-only views into `data`.

    verify: also compare the digest in the header; not needed for bytes that a blob store has just proved.
    with_mask: the caller knows what a mask is; without it a frame that has one is refused.
    Raises CodecError naming what is missing, unknown, damaged or against an invariant.
    """
    frame = decode_frame(data)
    if frame.kind != FRAME_KIND:
        raise CodecError(f"frame is a '{frame.kind}', expected a '{FRAME_KIND}'")
    try:
        fields = msgspec.convert(frame.header, _Fields)
    except msgspec.ValidationError as error:
        raise CodecError(f"sample frame header: {error}") from error
    names = tuple(frame.arrays)
    masked = names[-2:] == _MASK
    if (names[:-2] if masked else names) not in ((*_REQUIRED,), (*_REQUIRED, *_ROUTES)):
        raise CodecError(
            f"sample frame has the arrays {list(names)}, expected {[*_REQUIRED]} and, or not, {[*_ROUTES]}, {[*_MASK]}"
        )
    if masked and not with_mask:
        raise CodecError(f"sample {fields.sample_id} has a sampling mask, which this reader does not ask for")
    if verify and payload_digest(frame.arrays.values()) != fields.digest:
        raise CodecError(f"sample {fields.sample_id}: the arrays do not hash to the digest in the header")
    values: dict[str, Any] = {**msgspec.structs.asdict(fields), **frame.arrays}
    del values["digest"]
    if masked:
        values["mask"] = SamplingMask(*(values.pop(name) for name in _MASK))
    sample = Sample(**values)
    check_sample(sample)
    return sample


def samples_to_bundle(samples: Sequence[Sample], *, with_mask: bool = False) -> bytes:
    """The samples of one rollout as one frame: that of the only one, or one of kind "samples" that holds theirs."""
    frames = [sample_to_frame(sample, with_mask=with_mask) for sample in samples]
    if len(frames) == 1:
        return frames[0]
    arrays: dict[str, NDArray[Any]] = {str(index): np.frombuffer(data, np.uint8) for index, data in enumerate(frames)}
    return encode_frame(BUNDLE_KIND, {"rollout_id": samples[0].rollout_id}, arrays)


def samples_from_bundle(data: bytes | memoryview, *, verify: bool = True, with_mask: bool = False) -> list[Sample]:
    """The samples in a frame of either kind. Raises as `sample_from_frame`, and for samples of different rollouts."""
    frame = decode_frame(data)
    if frame.kind != BUNDLE_KIND:
        return [sample_from_frame(data, verify=verify, with_mask=with_mask)]
    samples = [sample_from_frame(part.data, verify=verify, with_mask=with_mask) for part in frame.arrays.values()]
    if len({(sample.rollout_id, sample.reward) for sample in samples}) != 1:
        raise CodecError("a frame of samples must hold one rollout's, with its one reward")
    return samples


def check_sample(sample: Sample) -> None:
    """Raise CodecError unless the sample keeps every invariant of this module."""
    for name, (dtype, ndim) in _REQUIRED.items():
        array: NDArray[Any] = getattr(sample, name)
        if array.dtype != np.dtype(dtype) or array.ndim != ndim:
            wrong = f"{array.dtype}{list(array.shape)}, expected {np.dtype(dtype)} with {ndim} dimensions"
            raise _broken(sample, f"{name} is {wrong}")
    if not (math.isfinite(sample.reward) and math.isfinite(sample.temperature) and sample.temperature >= 0):
        raise _broken(sample, f"reward {sample.reward} or temperature {sample.temperature} is not a usable number")
    _check_tokens(sample)
    _check_spans(sample)
    _check_routes(sample)
    if sample.mask is not None:
        try:
            sample.mask.check(sample.tokens)
        except CodecError as error:
            raise _broken(sample, str(error)) from error
        forced = np.diff(sample.mask.offsets) == 1
        _refuse(sample, ~forced & (sample.loss_mask == 0), "a token outside the loss was chosen from several")


def _check_tokens(sample: Sample) -> None:
    n = len(sample.tokens)
    if n == 0:
        raise _broken(sample, "there are no tokens")
    for name in ("loss_mask", "logprobs", "turn_index"):
        if len(getattr(sample, name)) != n:
            raise _broken(sample, f"{name} has {len(getattr(sample, name))} entries for {n} tokens")
    trained, turns = sample.loss_mask == 1, len(sample.turn_rewards)
    _refuse(sample, sample.tokens < 0, "a token id is negative")
    _refuse(sample, sample.loss_mask > 1, "loss_mask is neither 0 nor 1")
    _refuse(sample, ~np.isfinite(sample.logprobs), "the log-prob is not finite")
    _refuse(sample, ~trained & (sample.logprobs != 0), "a token outside the loss has a log-prob")
    _refuse(sample, ~trained & (sample.turn_index != -1), "a token outside the loss belongs to a turn")
    _refuse(
        sample,
        trained & ((sample.turn_index < 0) | (sample.turn_index >= turns)),
        f"turn_index is not one of the {turns} turns",
    )


def _check_spans(sample: Sample) -> None:
    n, spans = len(sample.tokens), sample.version_spans
    if spans.shape[1] != 3:
        raise _broken(sample, f"version_spans is [{spans.shape[0]}, {spans.shape[1]}], expected [k, 3]")
    previous = 0
    for start, end, version in spans.tolist():
        if not previous <= start < end <= n or version < 0:
            raise _broken(
                sample, f"version span ({start}, {end}, {version}) is empty, out of order or beyond {n} tokens"
            )
        previous = end
    covered = np.zeros(n, np.bool_)
    for start, end, _ in spans.tolist():
        covered[start:end] = True
    _refuse(sample, (sample.loss_mask == 1) & ~covered, "no version span covers a token of the loss")


def _check_routes(sample: Sample) -> None:
    routes, provenance, rows = sample.routes, sample.routes_provenance, len(sample.tokens) - 1
    if routes is None and provenance is None:
        return
    if routes is None or provenance is None:
        raise _broken(sample, "routes and routes_provenance come together or not at all")
    if routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3 or len(routes) != rows:
        found = f"{routes.dtype}{list(routes.shape)}"
        raise _broken(sample, f"routes is {found}, expected uint8 or uint16 [{rows}, layers, top_k]")
    if provenance.dtype != np.uint8 or provenance.shape != (rows,):
        found = f"{provenance.dtype}{list(provenance.shape)}"
        raise _broken(sample, f"routes_provenance is {found}, expected uint8[{rows}]")
    _refuse(sample, provenance > ROW_ABSENT, "routes_provenance has an unknown value", "row")


def _refuse(sample: Sample, wrong: NDArray[np.bool_], what: str, unit: str = "token") -> None:
    if wrong.any():
        raise _broken(sample, f"{what} ({unit} {int(wrong.argmax())})")


def _broken(sample: Sample, what: str) -> CodecError:
    return CodecError(f"sample {sample.sample_id}: {what}")
