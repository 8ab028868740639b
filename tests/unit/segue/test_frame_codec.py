from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from segue.errors import CodecError
from segue.wire.frame import DTYPES, decode_frame, encode_frame, exactly, payload_digest


def build(arrays: list[dict[str, Any]], data: bytes, *, version: int = 1, **extra: object) -> bytes:
    """A frame by hand, as another implementation would write it."""
    text = json.dumps({"kind": "t", "version": version, "fields": {}, "arrays": arrays, **extra}).encode()
    head = struct.pack("<4sI", b"SEGF", len(text)) + text
    return head + bytes(-len(head) % 64) + data


def described(name: str = "a", dtype: str = "int32", shape: tuple[int, ...] = (2,), offset: int = 0) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "offset": offset}


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.sampled_from(sorted(DTYPES)).flatmap(
            lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        ),
        max_size=4,
    )
)
def test_any_arrays_come_back_bit_for_bit(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    frame = decode_frame(encode_frame("t", {"x": [1, None, 0.1, "ü"]}, arrays))
    assert frame.header == {"x": [1, None, 0.1, "ü"]}
    assert list(frame.arrays) == list(arrays)
    for name, array in arrays.items():
        assert frame.arrays[name].dtype == array.dtype
        assert frame.arrays[name].shape == array.shape
        assert frame.arrays[name].tobytes() == array.tobytes()


def test_bytes_are_laid_out_as_documented() -> None:
    data = encode_frame("k", {"n": 3}, {"a": np.array([1, 2, 3], np.uint8), "b": np.array([[1.5]], np.float32)})
    magic, length = struct.unpack_from("<4sI", data)
    header = json.loads(data[8 : 8 + length])
    assert magic == b"SEGF"
    assert header["arrays"] == [described("a", "uint8", [3], 0), described("b", "float32", [1, 1], 64)]  # type: ignore[arg-type]
    start = -(-(8 + length) // 64) * 64
    assert data[start : start + 3] == b"\1\2\3"
    assert data[start + 64 :] == struct.pack("<f", 1.5)
    assert build(header["arrays"], data[start:])[-68:] == data[-68:]


def test_views_share_memory_and_cannot_be_written() -> None:
    data = encode_frame("t", {}, {"a": np.arange(4, dtype=np.int64)})
    frame = decode_frame(data)
    assert np.shares_memory(frame.arrays["a"], np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        frame.arrays["a"][0] = 1
    assert not decode_frame(memoryview(bytearray(data))).arrays["a"].flags.writeable


def test_strided_and_big_endian_arrays_encode_like_their_plain_copies() -> None:
    plain = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert encode_frame("t", {}, {"a": plain.T}) == encode_frame("t", {}, {"a": plain.T.copy()})
    assert encode_frame("t", {}, {"a": plain.astype(">i4")}) == encode_frame("t", {}, {"a": plain})


@pytest.mark.parametrize("array", [np.array([True]), np.array(["x"]), np.array([object()]), np.zeros(2, np.complex64)])
def test_a_dtype_outside_the_list_is_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CodecError, match="'a' is .* which no frame can hold"):
        encode_frame("t", {}, {"a": array})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_header_that_json_would_change_is_refused(value: Any) -> None:
    with pytest.raises(CodecError, match="header is not JSON"):
        encode_frame("t", {"v": value}, {})


def test_every_truncation_and_every_trailing_byte_is_refused() -> None:
    data = encode_frame("t", {"v": 1}, {"a": np.arange(3, dtype=np.int32), "b": np.arange(5, dtype=np.uint8)})
    for length in range(len(data)):
        with pytest.raises(CodecError):
            decode_frame(data[:length])
    with pytest.raises(CodecError, match="1 trailing bytes"):
        decode_frame(data + b"\0")


ONE = np.arange(2, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "shorter than its prefix"),
        (b"JUNKJUNKJUNK", "not a frame"),
        (build([described(dtype="object")], ONE), "dtype 'object'"),
        (build([described(dtype=">i4")], ONE), "dtype '>i4'"),
        (build([described(shape=(-2,))], ONE), "impossible shape"),
        (build([described(shape=(1,) * 9)], ONE), "impossible shape"),
        (build([described(shape=(2**40, 2**40))], ONE), "truncated"),
        (build([described(), described()], ONE + bytes(64)), "twice"),
        (build([described(), described("b", offset=4)], ONE), "overlaps"),
        (build([described(), described("b", offset=-64)], ONE), "overlaps"),
        (build([described(offset=64)], bytes(64) + ONE), "starts at 64, expected 0"),
        (build([described(), described("b", offset=64)], ONE + b"\1" * 56 + ONE), "padding that is not zero"),
        (build([described()], ONE, version=2), "version 2"),
        (build([described()], ONE, surprise=1), "unknown field"),
        (build([{**described(), "shape": "x"}], ONE), "shape"),
        (struct.pack("<4sI", b"SEGF", 56) + b"\xff" * 56, "frame header"),
        (struct.pack("<4sI", b"SEGF", 2**32 - 1) + bytes(60), "truncated"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_frame(data)


@given(st.binary(max_size=200))
def test_junk_never_gives_another_error(data: bytes) -> None:
    for candidate in (data, struct.pack("<4sI", b"SEGF", len(data)) + data + bytes(64)):
        with pytest.raises(CodecError):
            decode_frame(candidate)


def test_typed_access_names_a_missing_array_a_wrong_dtype_and_a_wrong_rank() -> None:
    frame = decode_frame(encode_frame("t", {}, {"a": np.zeros(2, np.int32)}))
    assert frame.array("a", np.int32).tolist() == [0, 0]
    with pytest.raises(CodecError, match="'b' is missing"):
        frame.array("b", np.int32)
    with pytest.raises(CodecError, match=r"'a' is int32\[2\], expected int64"):
        frame.array("a", np.int64)
    with pytest.raises(CodecError, match="with 2 dimensions"):
        frame.array("a", np.int32, 2)


def test_a_cast_that_changes_a_value_is_refused_with_its_place() -> None:
    assert exactly("a", [1, 2, 255], np.uint8).dtype == np.uint8
    assert exactly("a", [], np.int32).dtype == np.int32
    assert np.isnan(exactly("a", [float("nan")], np.float32)).all()
    with pytest.raises(CodecError, match="256 at 1 is not a uint8"):
        exactly("a", [0, 256], np.uint8)
    with pytest.raises(CodecError, match="0.5 at 0"):
        exactly("a", [0.5], np.int32)
    with pytest.raises(CodecError, match="-1 at 0"):
        exactly("a", [-1], np.uint16)
    with pytest.raises(CodecError, match="9007199254740993 at 0"):
        exactly("a", [2**53 + 1], np.float64)
    with pytest.raises(CodecError, match="nan at 0"):
        exactly("a", [float("nan")], np.int32)
    with pytest.raises(CodecError, match="expected int32"):
        exactly("a", ["1"], np.int32)


def test_the_payload_digest_is_that_of_the_raw_bytes() -> None:
    a, b = np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(3, dtype=np.uint8)
    assert payload_digest([a.T, b]) == hashlib.sha256(a.T.tobytes() + b.tobytes()).hexdigest()
