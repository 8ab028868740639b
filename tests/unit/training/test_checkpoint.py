"""Checkpoint folders: complete or absent, verified before use, replaced only when the new one is durable."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from segue.errors import TrainerError
from training import checkpoint
from training.checkpoint import Layout
from training.protocol import CheckpointInfo

LAYOUT = Layout("test", checkpoint.parameters_hash({"w": ("float32", (2, 3))}))
INFO = CheckpointInfo(step=4, version=5, cursor="1-0", digest="d")


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", {"a.bin": b"one", "b.bin": b"two"}, LAYOUT, INFO)
    files, info = checkpoint.read(tmp_path / "c", LAYOUT)
    assert files == {"a.bin": b"one", "b.bin": b"two"}
    assert info == INFO
    assert [p.name for p in tmp_path.iterdir()] == ["c"], "no temporary folder is left"


def test_a_failed_write_leaves_the_older_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", {"a.bin": b"old"}, LAYOUT, INFO)
    with pytest.raises(OSError):
        checkpoint.write(tmp_path / "c", {"a.bin": b"new", "no/such/folder": b""}, LAYOUT, INFO)
    assert checkpoint.read(tmp_path / "c", LAYOUT)[0] == {"a.bin": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_second_write_replaces_the_first_whole(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", {"a.bin": b"old"}, LAYOUT, INFO)
    checkpoint.write(tmp_path / "c", {"b.bin": b"new"}, LAYOUT, INFO)
    assert checkpoint.read(tmp_path / "c", LAYOUT)[0] == {"b.bin": b"new"}
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["b.bin", "manifest.json"]


@pytest.mark.parametrize("damage", ["change a byte", "remove a file", "remove the manifest", "cut the manifest"])
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "c"
    checkpoint.write(folder, {"a.bin": b"one"}, LAYOUT, INFO)
    match damage:
        case "change a byte":
            (folder / "a.bin").write_bytes(b"onE")
        case "remove a file":
            (folder / "a.bin").unlink()
        case "remove the manifest":
            (folder / "manifest.json").unlink()
        case _:
            (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-40])
    with pytest.raises(TrainerError):
        checkpoint.read(folder, LAYOUT)


@pytest.mark.parametrize(
    "change", [{"implementation": "other"}, {"layout_version": 2}, {"world_size": 8}, {"parameters": "0" * 64}]
)
def test_another_layout_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    checkpoint.write(tmp_path / "c", {"a.bin": b"one"}, LAYOUT, INFO)
    with pytest.raises(TrainerError, match=next(iter(change))):
        checkpoint.read(tmp_path / "c", dataclasses.replace(LAYOUT, **change))  # type: ignore[arg-type]


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", {"a.bin": b"one"}, LAYOUT, INFO)
    manifest = tmp_path / "c" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("a.bin", "../secret"))
    with pytest.raises(TrainerError, match="outside"):
        checkpoint.read(tmp_path / "c", LAYOUT)
