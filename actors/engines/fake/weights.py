"""Weights of the fake engine: named tensors as bytes, read from pickles and safetensors files without torch.

Invariants: unpickling builds tensors and nothing else (any other global is refused); two loads of equal tensors give
equal checksums whichever way they came; a load that fails changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class WeightsRefused(ValueError):
    """A payload or folder that holds no weights; the message says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype (torch's name), shape and contiguous little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def checksum(self) -> str:
        """64 bits, hexadecimal, over dtype, shape and bytes."""
        head = f"{self.dtype}{self.shape}".encode()
        return hashlib.blake2b(head + self.data, digest_size=8).hexdigest()


def from_pickle(payload: bytes, load_format: str | None) -> dict[str, Tensor]:
    """Tensors of a pickled list of (name, tensor), or of one pickled flattened bucket."""
    try:
        loaded = _Unpickler(io.BytesIO(payload)).load()
        if load_format == "flattened_bucket":
            return _split_bucket(loaded["flattened_tensor"], loaded["metadata"])
        if load_format not in (None, "direct"):
            raise WeightsRefused(f"unknown load_format {load_format!r}")
        tensors = dict(loaded)
        wrong = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
        if wrong:
            raise WeightsRefused(f"{wrong[0]} is no tensor")
        return tensors
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise WeightsRefused(f"the payload does not unpickle to named tensors: {error!r}") from error


def from_folder(folder: Path) -> dict[str, Tensor]:
    """Tensors of all *.safetensors files of a folder; WeightsRefused if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsRefused(f"no *.safetensors files in {folder}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        raw = file.read_bytes()
        start = 8 + struct.unpack_from("<Q", raw)[0]
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, last = (start + offset for offset in entry["data_offsets"])
                tensors[name] = Tensor(_SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"]), raw[first:last])
    return tensors


# --- reading torch's pickles ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Name:
    """A torch dtype or storage class, which matters by name only."""

    name: str


class _BucketEntry:
    """Stand-in for the metadata of one tensor in a flattened bucket; unpickling fills its attributes."""

    name: str
    shape: tuple[int, ...]
    dtype: _Name
    start_idx: int
    end_idx: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return _GLOBALS[module, name]
        if module == "torch" and (name in ITEM_BYTES or name in _STORAGE_DTYPES):
            return _Name(name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a weight payload")


class _StorageUnpickler(_Unpickler):
    def persistent_load(self, pid: Any) -> _Name:
        kind, storage_class = pid[0], pid[1]
        if kind != "storage" or storage_class.name not in _STORAGE_DTYPES:
            raise pickle.UnpicklingError(f"{pid!r} is no storage")
        return _Name(_STORAGE_DTYPES[storage_class.name])


def _storage(raw: bytes) -> tuple[str, bytes]:
    """torch.save's old stream: magic, protocol, machine, the storage's id, its key; then a count and the bytes."""
    stream = io.BytesIO(raw)
    for _ in range(3):
        _Unpickler(stream).load()
    dtype = _StorageUnpickler(stream).load().name
    _Unpickler(stream).load()
    count = struct.unpack("<q", stream.read(8))[0]
    return dtype, stream.read(count * ITEM_BYTES[dtype])


def _tensor(
    storage: tuple[str, bytes], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_ignored: object
) -> Tensor:
    dtype, raw = storage
    size = ITEM_BYTES[dtype]
    steps = [stride * size for stride in strides]
    view = np.ndarray(tuple(shape), np.dtype(("V", size)), raw, offset * size, steps)
    return Tensor(dtype, tuple(shape), view.tobytes())


def _split_bucket(flat: Tensor, entries: list[_BucketEntry]) -> dict[str, Tensor]:
    tensors = {}
    for entry in entries:
        data = flat.data[entry.start_idx : entry.end_idx]
        tensors[entry.name] = Tensor(entry.dtype.name, tuple(entry.shape), data)
    return tensors


_GLOBALS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _BucketEntry,
}
