"""A frame: a JSON header followed by raw little-endian arrays. Tensors never travel as JSON.

Layout: `SEGF`, uint32 length of the header, the header as compact JSON, then each array at an offset that is a multiple
of 64 bytes from the start of the data, which itself starts at a multiple of 64. The gaps are zero.

Invariants: one content has one encoding (arrays follow each other in the order given, without slack), so equal frames
are equal bytes; decoding copies nothing and gives read-only views; everything that is not exactly such a frame is a
CodecError that says what is wrong. Dtypes are pinned: an array of another dtype is refused, never cast.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from segue.errors import CodecError

type JSON = bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None

VERSION = 1
ALIGNMENT_BYTES = 64
"""One cache line, and what vectorised loads want."""

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}
"""All dtypes that may be in a frame. Booleans travel as uint8: a view of foreign bytes as bool is undefined."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""A dtype's own name is put together anew each time that it is asked for. Foreign byte orders are not here."""
_MAGIC = b"SEGF"
_PREFIX = struct.Struct("<4sI")
_MAX_DIMENSIONS = 8
_HEADER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    version: int
    fields: dict[str, Any]
    arrays: tuple[_Array, ...]


_DECODER = msgspec.json.Decoder(_Header)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A decoded frame. `arrays` are read-only views into the bytes that were decoded."""

    kind: str
    header: Mapping[str, JSON]
    arrays: Mapping[str, NDArray[Any]]

    def array[Scalar: np.generic](self, name: str, dtype: type[Scalar], ndim: int = 1) -> NDArray[Scalar]:
        """The array `name`, which must have exactly this dtype and number of dimensions. Raises CodecError."""
        found = self.arrays.get(name)
        if found is None:
            raise CodecError(f"frame {self.kind}: array '{name}' is missing; there are {sorted(self.arrays)}")
        if found.dtype != np.dtype(dtype) or found.ndim != ndim:
            raise CodecError(
                f"frame {self.kind}: array '{name}' is {found.dtype}{list(found.shape)}, "
                f"expected {np.dtype(dtype)} with {ndim} dimensions"
            )
        return found


def exactly[Scalar: np.generic](name: str, values: ArrayLike, dtype: type[Scalar]) -> NDArray[Scalar]:
    """`values` as an array of `dtype`; CodecError naming the first value that the cast would change."""
    given = np.asarray(values)
    if given.dtype == np.dtype(dtype):
        return given
    if given.size == 0:
        return np.empty(given.shape, dtype)
    if given.dtype.kind not in "iufb":
        raise CodecError(f"array '{name}' has dtype {given.dtype}, expected {np.dtype(dtype)}")
    with np.errstate(all="ignore"):
        cast = given.astype(dtype)
        changed = (cast != given) | (cast.astype(given.dtype) != given)
        changed &= ~(np.isnan(cast) & np.isnan(given))
    if np.any(changed):
        at = int(np.flatnonzero(changed)[0])
        raise CodecError(f"array '{name}': {given.reshape(-1)[at]} at {at} is not a {np.dtype(dtype)}")
    return cast


def payload_digest(arrays: Iterable[NDArray[Any]]) -> str:
    """sha256 hex of the arrays' bytes, one after another, as they stand in a frame."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(array, order="C").data)
    return digest.hexdigest()


def encode_frame(kind: str, header: Mapping[str, JSON], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The frame's bytes; each array is copied once (twice if it is not contiguous). Raises CodecError.

    header: finite JSON values; arrays: name to array, in the order in which they are laid out.
    """
    described: list[dict[str, JSON]] = []
    parts: list[bytes | memoryview] = []
    end = 0
    for name, array in arrays.items():
        name_of_dtype = _NAMES.get(array.dtype) or array.dtype.name
        dtype = DTYPES.get(name_of_dtype)
        if dtype is None or array.ndim > _MAX_DIMENSIONS:
            raise CodecError(
                f"frame {kind}: array '{name}' is {array.dtype}{list(array.shape)}, which no frame can hold"
            )
        raw = np.asarray(array, dtype=dtype, order="C")
        offset = _aligned(end)
        parts += (bytes(offset - end), raw.data)
        described.append({"name": name, "dtype": name_of_dtype, "shape": raw.shape, "offset": offset})
        end = offset + raw.nbytes
    try:
        text = _HEADER.encode({"kind": kind, "version": VERSION, "fields": dict(header), "arrays": described}).encode()
    except (TypeError, ValueError) as error:
        raise CodecError(f"frame {kind}: the header is not JSON: {error}") from error
    begin = _PREFIX.size + len(text)
    return b"".join([_PREFIX.pack(_MAGIC, len(text)), text, bytes(_aligned(begin) - begin), *parts])


def decode_frame(data: bytes | memoryview) -> Frame:
    """The frame in `data`, which it must fill exactly. Copies no array. Raises CodecError."""
    view = memoryview(data).cast("B").toreadonly()
    header, start = _decode_header(view)
    arrays: dict[str, NDArray[Any]] = {}
    end = 0
    for described in header.arrays:
        where = f"frame {header.kind}: array '{described.name}'"
        dtype = DTYPES.get(described.dtype)
        if dtype is None:
            raise CodecError(f"{where} has dtype '{described.dtype}', which no frame can hold")
        if described.name in arrays:
            raise CodecError(f"{where} is there twice")
        if len(described.shape) > _MAX_DIMENSIONS or any(size < 0 for size in described.shape):
            raise CodecError(f"{where} has an impossible shape {list(described.shape)}")
        if described.offset < end:
            raise CodecError(
                f"{where} starts at {described.offset} and overlaps the one before it, which ends at {end}"
            )
        if described.offset != _aligned(end):
            raise CodecError(f"{where} starts at {described.offset}, expected {_aligned(end)}")
        nbytes = math.prod(described.shape) * dtype.itemsize
        if start + described.offset + nbytes > len(view):
            raise CodecError(
                f"{where} is truncated: {nbytes} bytes at {described.offset} go beyond the end of the frame"
            )
        if any(view[start + end : start + described.offset]):
            raise CodecError(f"{where} follows padding that is not zero")
        arrays[described.name] = np.ndarray(described.shape, dtype, view, start + described.offset)
        end = described.offset + nbytes
    if start + end != len(view):
        raise CodecError(f"frame {header.kind}: {len(view) - start - end} trailing bytes after the last array")
    return Frame(header.kind, header.fields, arrays)


def _decode_header(view: memoryview) -> tuple[_Header, int]:
    """The header and where the data starts."""
    if len(view) < _PREFIX.size:
        raise CodecError(f"frame is truncated: {len(view)} bytes, shorter than its prefix")
    magic, length = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise CodecError(f"not a frame: it starts with {bytes(magic)!r}, not {_MAGIC!r}")
    begin = _PREFIX.size + length
    start = _aligned(begin)
    if start > len(view):
        raise CodecError(f"frame is truncated: {len(view)} bytes, but its header ends at {begin}")
    try:
        header = _DECODER.decode(view[_PREFIX.size : begin])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CodecError(f"frame header: {error}") from error
    if header.version != VERSION:
        raise CodecError(f"frame {header.kind}: version {header.version}, this build reads {VERSION}")
    if any(view[begin:start]):
        raise CodecError(f"frame {header.kind}: the padding after the header is not zero")
    return header, start


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
