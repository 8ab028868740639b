"""Checkpoint folders: data files and a manifest, written all or nothing. Torch-free.

Layout: `<folder>/manifest.json` beside the data files. The manifest names every file with its SHA-256, who wrote it
(implementation, layout version, world size, a hash of the parameters' names, shapes and dtypes) and where the run was.

Invariants:
- A folder under its final name is complete: everything was fsynced under a temporary name before the rename.
- Nothing is read from a data file before its hash was compared.
- Another implementation, layout version, world size or parameter set is refused with the difference in the message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from segue.errors import TrainerError
from training.protocol import CheckpointInfo

LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """What must agree between writer and reader. `parameters`: hash of the sorted (name, dtype, shape) list."""

    implementation: str
    parameters: str
    world_size: int = 1
    layout_version: int = LAYOUT_VERSION


def parameters_hash(parameters: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """SHA-256 over name -> (dtype, shape), independent of order."""
    rows = [[name, dtype, list(shape)] for name, (dtype, shape) in sorted(parameters.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def write(folder: Path, files: Mapping[str, bytes | memoryview], layout: Layout, info: CheckpointInfo) -> None:
    """Write the files and the manifest; replaces a folder of the same name only after the new one is durable."""
    temporary = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    replaced = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        hashes = {}
        for name, data in files.items():
            _write_durably(temporary / name, data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        manifest = {"layout": dataclasses.asdict(layout), "info": dataclasses.asdict(info), "files": hashes}
        _write_durably(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        _fsync_folder(temporary)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        _fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def read(folder: Path, layout: Layout) -> tuple[dict[str, bytes], CheckpointInfo]:
    """The verified files and the manifest's account; raises TrainerError on damage or another layout."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        theirs = Layout(**manifest["layout"])
        info = CheckpointInfo(**manifest["info"])
        hashes: dict[str, str] = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{folder} is not a complete checkpoint: {error}") from error
    for name in ("implementation", "layout_version", "world_size", "parameters"):
        ours, other = getattr(layout, name), getattr(theirs, name)
        if ours != other:
            raise TrainerError(
                f"{folder} has {name} {other!r}, this trainer has {ours!r}; "
                "export its weights as a Hugging Face folder and start from that"
            )
    files = {}
    for name, expected in hashes.items():
        if Path(name).name != name:
            raise TrainerError(f"{folder}: the manifest names a file outside the folder: {name!r}")
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise TrainerError(f"{folder}: {error}") from error
        if hashlib.sha256(data).hexdigest() != expected:
            raise TrainerError(f"{folder}/{name} is damaged: its hash differs from the manifest's")
        files[name] = data
    return files, info


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
