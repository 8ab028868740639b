"""Weights of the fake engine: named tensors as bytes, read from pickles and safetensors files without torch.

Checksums carry SGLang's names and rule: it fuses q, k and v, gate and up, and the experts of a layer (all of it along
the first axis, so bytes follow bytes), pads vocabularies with zero rows, and reports 8 bytes of SHA-256.

Invariants: unpickling builds tensors and nothing else (any other global is refused); two loads of equal tensors give
equal checksums whichever way they came; a load that fails changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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


_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_PADDED = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64


class WeightsRefused(ValueError):
    """A payload or folder that holds no weights; the message says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype (torch's name), shape and contiguous little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Engine's parameter name -> checksum, for tensors under the names of a checkpoint."""
    parts: dict[str, list[tuple[int, int, bytes]]] = {}
    for name, tensor in tensors.items():
        target, expert, place = _engine_name(name)
        parts.setdefault(target, []).append((expert, place, tensor.data + _padding(name, tensor)))
    return {name: _checksum(b"".join(data for _, _, data in sorted(rows))) for name, rows in sorted(parts.items())}


def _engine_name(name: str) -> tuple[str, int, int]:
    if match := _EXPERT.match(name):
        fused = "w2_weight" if match[3] == "down" else "w13_weight"
        return f"{match[1]}.{fused}", int(match[2]), int(match[3] == "up")
    for place, plain in enumerate(("q_proj", "k_proj", "v_proj")):
        if f".{plain}." in name:
            return name.replace(plain, "qkv_proj"), 0, place
    for place, plain in enumerate(("gate_proj", "up_proj")):
        if f".{plain}." in name:
            return name.replace(plain, "gate_up_proj"), 0, place
    return name, 0, 0


def _padding(name: str, tensor: Tensor) -> bytes:
    if name not in _PADDED:
        return b""
    return bytes(-tensor.shape[0] % _VOCAB_MULTIPLE * tensor.shape[1] * ITEM_BYTES[tensor.dtype])


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).digest()[:8].hex()


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


def _split_bucket(flat: Tensor, entries: list[SimpleNamespace]) -> dict[str, Tensor]:
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
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): SimpleNamespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
}
