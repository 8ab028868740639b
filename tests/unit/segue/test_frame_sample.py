from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segue.errors import CodecError
from segue.wire.frame import decode_frame, encode_frame
from segue.wire.mask import SamplingMask
from segue.wire.sample import (
    ROW_ABSENT,
    ROW_DECODED,
    ROW_RECOMPUTED,
    Sample,
    sample_from_frame,
    sample_to_frame,
    samples_from_bundle,
    samples_to_bundle,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "frames"


def plain() -> Sample:
    return Sample(
        sample_id="sample-1",
        rollout_id="train-3-1",
        session_id="session-1",
        group_id="train-3",
        member=1,
        reward=0.625,
        temperature=1.0,
        tokens=np.array([1, 2, 7, 8, 3, 9], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
        logprobs=np.array([0, 0, -0.25, -1.5, 0, -0.125], np.float32),
        turn_index=np.array([-1, -1, 0, 0, -1, 1], np.int32),
        version_spans=np.array([[2, 3, 4], [3, 4, 5], [5, 6, 5]], np.int32),
        turn_rewards=np.array([0.5, np.nan], np.float32),
        metadata={"family": "chatml", "b": "ü"},
    )


def routed() -> Sample:
    routes = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    provenance = np.array([ROW_DECODED, ROW_DECODED, ROW_RECOMPUTED, ROW_ABSENT, ROW_DECODED], np.uint8)
    return dataclasses.replace(plain(), sample_id="sample-2", routes=routes, routes_provenance=provenance)


def masked() -> Sample:
    mask = SamplingMask.of([[1], [2], [7, 30], [5, 8, 11], [3], [9]])
    return dataclasses.replace(routed(), sample_id="sample-3", mask=mask)


def test_the_bytes_of_later_fields_never_change_either_and_no_older_reader_sees_them() -> None:
    golden = (GOLDEN / "sample_v1_mask.frame").read_bytes()
    assert sample_to_frame(masked(), with_mask=True) == golden
    assert sample_to_frame(sample_from_frame(golden, with_mask=True), with_mask=True) == golden
    without = dataclasses.replace(masked(), mask=None)
    assert sample_to_frame(masked()) == sample_to_frame(without) == sample_to_frame(without, with_mask=True)
    with pytest.raises(CodecError, match="sample-3 has a sampling mask, which this reader does not ask for"):
        sample_from_frame(golden)


def test_the_samples_of_one_rollout_travel_in_one_frame() -> None:
    golden = (GOLDEN / "samples_v1.frame").read_bytes()
    samples = [plain(), masked()]
    assert samples_to_bundle(samples, with_mask=True) == golden
    back = samples_from_bundle(golden, with_mask=True)
    assert [sample_to_frame(s, with_mask=True) for s in back] == [sample_to_frame(s, with_mask=True) for s in samples]
    assert samples_to_bundle([plain()]) == sample_to_frame(plain())  # one is what it always was
    assert len(samples_from_bundle(sample_to_frame(plain()))) == 1
    stranger = dataclasses.replace(plain(), rollout_id="train-3-2")
    with pytest.raises(CodecError, match="must hold one rollout's, with its one reward"):
        samples_from_bundle(samples_to_bundle([plain(), stranger]))
    richer = dataclasses.replace(plain(), reward=1.0)
    with pytest.raises(CodecError, match="its one reward"):
        samples_from_bundle(samples_to_bundle([plain(), richer]))


def test_a_mask_must_be_that_of_the_samples_tokens() -> None:
    short = SamplingMask.of([[1], [2], [7], [8], [3]])
    with pytest.raises(CodecError, match="sample-3: sampling mask of 5 tokens for 6"):
        sample_to_frame(dataclasses.replace(masked(), mask=short))
    other = SamplingMask.of([[1], [2], [7], [5], [3], [9]])
    with pytest.raises(CodecError, match=r"token 3 \(8\) is not in the set it was chosen from"):
        sample_to_frame(dataclasses.replace(masked(), mask=other))
    free = SamplingMask.of([[1, 4], [2], [7], [8], [3], [9]])
    with pytest.raises(CodecError, match=r"a token outside the loss was chosen from several \(token 0\)"):
        sample_to_frame(dataclasses.replace(masked(), mask=free))


def changed(**arrays: Any) -> Sample:
    return dataclasses.replace(routed(), **arrays)


@pytest.mark.parametrize(("name", "sample"), [("sample_v1", plain()), ("sample_v1_routes", routed())])
def test_the_bytes_of_a_sample_never_change(name: str, sample: Sample) -> None:
    """Fails after any change to the fields, their order or the layout: readers of older builds would break."""
    golden = (GOLDEN / f"{name}.frame").read_bytes()
    assert sample_to_frame(sample) == golden
    assert sample_to_frame(sample_from_frame(golden)) == golden


@pytest.mark.parametrize("sample", [plain(), routed()])
def test_a_sample_comes_back_equal(sample: Sample) -> None:
    back = sample_from_frame(sample_to_frame(sample))
    for field in dataclasses.fields(Sample):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(sample, field.name))
    assert back.tokens.dtype == np.int32
    assert not back.tokens.flags.writeable


def test_the_header_names_the_digest_of_the_arrays() -> None:
    sample = plain()
    arrays = (sample.tokens, sample.loss_mask, sample.logprobs, sample.turn_index, sample.version_spans)
    raw = b"".join(array.tobytes() for array in (*arrays, sample.turn_rewards))
    assert decode_frame(sample_to_frame(sample)).header["digest"] == hashlib.sha256(raw).hexdigest()


def test_a_flipped_bit_is_found_when_asked_for() -> None:
    data = bytearray(sample_to_frame(plain()))
    at = bytes(data).index(plain().tokens.tobytes())
    data[at] ^= 4
    with pytest.raises(CodecError, match="sample-1: the arrays do not hash"):
        sample_from_frame(bytes(data))
    assert sample_from_frame(bytes(data), verify=False).tokens[0] == 5


def test_wide_expert_ids_stay_sixteen_bits() -> None:
    routes = np.full((5, 2, 3), 300, np.uint16)
    back = sample_from_frame(sample_to_frame(changed(routes=routes)))
    assert back.routes is not None
    assert back.routes.dtype == np.uint16
    assert (back.routes == 300).all()


def test_a_single_token_has_no_rows() -> None:
    one = Sample(
        "s", "r", "e", "g", 0, 0.0, 1.0,
        np.array([5], np.int32), np.array([0], np.uint8), np.zeros(1, np.float32), np.array([-1], np.int32),
        np.zeros((0, 3), np.int32), np.zeros(0, np.float32), np.zeros((0, 2, 3), np.uint8), np.zeros(0, np.uint8),
    )  # fmt: skip
    back = sample_from_frame(sample_to_frame(one))
    assert back.routes is not None
    assert back.routes.shape == (0, 2, 3)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tokens": np.array([1, 2, 7, 8, 3, 9], np.int64)}, r"tokens is int64\[6\], expected int32"),
    ({"tokens": np.zeros(0, np.int32)}, "there are no tokens"),
    ({"tokens": np.array([1, 2, -7, 8, 3, 9], np.int32)}, r"negative \(token 2\)"),
    ({"loss_mask": np.zeros(5, np.uint8)}, "loss_mask has 5 entries for 6 tokens"),
    ({"loss_mask": np.array([0, 0, 2, 1, 0, 1], np.uint8)}, r"neither 0 nor 1 \(token 2\)"),
    ({"logprobs": np.array([0, 0, np.nan, -1.5, 0, -0.125], np.float32)}, r"not finite \(token 2\)"),
    ({"logprobs": np.array([0, -1, -0.25, -1.5, 0, 0], np.float32)}, r"outside the loss has a log-prob \(token 1\)"),
    ({"turn_index": np.array([-1, 0, 0, 0, -1, 1], np.int32)}, r"outside the loss belongs to a turn \(token 1\)"),
    ({"turn_index": np.array([-1, -1, 0, -1, -1, 1], np.int32)}, r"not one of the 2 turns \(token 3\)"),
    ({"turn_index": np.array([-1, -1, 0, 2, -1, 1], np.int32)}, r"not one of the 2 turns \(token 3\)"),
    ({"version_spans": np.array([[2, 4, 4]], np.int32)}, r"no version span covers .* \(token 5\)"),
    ({"version_spans": np.array([[2, 4, 4], [3, 6, 5]], np.int32)}, r"span \(3, 6, 5\) is empty, out of order"),
    ({"version_spans": np.array([[2, 7, 4]], np.int32)}, "beyond 6 tokens"),
    ({"version_spans": np.array([[2, 2, 4]], np.int32)}, "is empty"),
    ({"version_spans": np.array([[2, 6, -1]], np.int32)}, r"span \(2, 6, -1\)"),
    ({"version_spans": np.array([[2, 6]], np.int32)}, r"version_spans is \[1, 2\]"),
    ({"routes": None}, "together or not at all"),
    ({"routes_provenance": None}, "together or not at all"),
    ({"routes": np.zeros((6, 2, 3), np.uint8)}, r"routes is uint8\[6, 2, 3\], expected .* \[5, layers, top_k\]"),
    ({"routes": np.zeros((5, 2, 3), np.int32)}, "routes is int32"),
    ({"routes_provenance": np.zeros(6, np.uint8)}, r"routes_provenance is uint8\[6\]"),
    ({"routes_provenance": np.array([0, 0, 3, 0, 0], np.uint8)}, r"unknown value \(row 2\)"),
    ({"reward": float("nan")}, "reward nan"),
    ({"temperature": -1.0}, "temperature -1.0"),
]


@pytest.mark.parametrize(("wrong", "message"), BROKEN)
def test_a_broken_sample_is_refused_by_its_writer_with_the_place(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=f"sample sample-2: .*{message}"):
        sample_to_frame(changed(**wrong))


def test_a_broken_frame_is_refused_by_its_reader() -> None:
    frame = decode_frame(sample_to_frame(routed()))
    header, arrays = dict(frame.header), dict(frame.arrays)

    def read(kind: str = "sample", **differences: Any) -> None:
        fields = {**header, **{k: v for k, v in differences.items() if k not in arrays}}
        kept = {**arrays, **{k: v for k, v in differences.items() if k in arrays}}
        sample_from_frame(encode_frame(kind, fields, {k: v for k, v in kept.items() if v is not None}), verify=False)

    read()
    with pytest.raises(CodecError, match="frame is a 'other', expected a 'sample'"):
        read("other")
    with pytest.raises(CodecError, match=r"header: .*member"):
        read(member="one")
    with pytest.raises(CodecError, match=r"header: .*unknown field `more`"):
        read(more=1)
    with pytest.raises(CodecError, match="has the arrays"):
        read(routes_provenance=None)
    with pytest.raises(CodecError, match="loss_mask has 1 entries"):
        read(loss_mask=np.zeros(1, np.uint8))
