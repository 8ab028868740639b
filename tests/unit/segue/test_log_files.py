"""Sealed segments, exports, trimming and the reader that joins them with a live log."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from segue.boot import Endpoints
from segue.config.schema import Config
from segue.errors import LogCorruptError, LogError, LogTrimmedError, LogUnavailable
from segue.log import FileLog, MemoryLog, export_jsonl, open_reader, seal, segment_dir, trim
from segue.log import reader as reader_module
from segue.log.sealing import Readable
from segue.testing.events import Pen
from segue.testing.log_fixtures import LogServer, log_server

__all__ = ["log_server"]  # fixture


async def filled(count: int, run: str = "run-1") -> tuple[MemoryLog, Pen]:
    log = MemoryLog(run)
    pen = Pen(run, "w", await log.claim("w"))
    await log.append([pen.prepare() for _ in range(count)])
    return log, pen


async def positions(log: Readable, after: int = 0) -> list[int]:
    """All positions that can be read; raises what reading raises."""
    found: list[int] = []
    while events := await log.read(after, limit=7):
        found += [e.position for e in events]
        after = found[-1]
    return found


async def up_to_damage(log: Readable) -> tuple[list[int], str]:
    """(what can be read before the damage, the message about it)."""
    found: list[int] = []
    try:
        while events := await log.read(found[-1] if found else 0, limit=7):
            found += [e.position for e in events]
    except LogCorruptError as error:
        return found, str(error)
    raise AssertionError("no damage was reported")


def rewrite(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the lines of a segment and compress it again."""
    lines = zstandard.ZstdDecompressor().decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(change(lines))))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


async def test_sealing_goes_on_where_the_files_end(tmp_path: Path) -> None:
    log, pen = await filled(25)
    assert await seal(log, tmp_path, size=10, full_only=True) == 20
    assert await seal(log, tmp_path, size=10, full_only=True) == 20
    assert await seal(log, tmp_path, 23, size=10) == 23
    assert await seal(log, tmp_path, size=10) == 25
    await log.append([pen.prepare() for _ in range(12)])
    assert await seal(log, tmp_path, size=10) == 37
    assert [p.name.split(".")[0] for p in segments(tmp_path)] == [
        "segment-000000000001-000000000010",
        "segment-000000000011-000000000020",
        "segment-000000000021-000000000023",
        "segment-000000000024-000000000025",
        "segment-000000000026-000000000035",
        "segment-000000000036-000000000037",
    ]
    assert await positions(FileLog(tmp_path)) == list(range(1, 38))


async def test_sealing_an_empty_log_leaves_nothing_to_open(tmp_path: Path) -> None:
    log, _ = await filled(0)
    assert await seal(log, tmp_path) == 0
    with pytest.raises(LogError, match="no sealed segments"):
        FileLog(tmp_path)


async def test_a_seal_cut_short_leaves_no_segment_and_is_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = await filled(25)
    await seal(log, tmp_path, 10, size=10)

    def crash(*args: object) -> None:
        raise OSError("the machine died here")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(OSError, match="died here"):
            await seal(log, tmp_path, size=10)
    assert await FileLog(tmp_path).tail() == 10
    assert len(os.listdir(tmp_path)) == 2
    assert await seal(log, tmp_path, size=10) == 25
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    assert await positions(FileLog(tmp_path)) == list(range(1, 26))


async def test_segments_of_another_run_are_not_added_to(tmp_path: Path) -> None:
    log, _ = await filled(5)
    await seal(log, tmp_path)
    other, _ = await filled(9, run="run-2")
    with pytest.raises(LogCorruptError, match="run-1, not of run-2"):
        await seal(other, tmp_path)


async def test_a_torn_segment_is_read_up_to_the_tear_and_then_reported(tmp_path: Path) -> None:
    log, _ = await filled(3000)
    await seal(log, tmp_path)
    [file] = segments(tmp_path)
    os.truncate(file, file.stat().st_size // 2)
    sealed = FileLog(tmp_path)
    found, message = await up_to_damage(sealed)
    assert 0 < len(found) < 3000
    assert found == list(range(1, len(found) + 1))
    assert f"torn after position {found[-1]}" in message
    with pytest.raises(LogCorruptError, match="torn"):
        await seal(log, tmp_path)


@pytest.mark.parametrize(
    ("change", "readable", "message"),
    [
        (lambda lines: lines[:-1], 10, "torn after position 10"),
        (lambda lines: lines[:5] + lines[6:], 4, "position 5 is missing: 6 stands there"),
        (lambda lines: [*lines[:5], lines[5].replace(b"nobody", b"n0body").replace(b'"w"', b'"x"'), *lines[6:]], 4,
         "the hash chain breaks at position 5"),
        (lambda lines: [*lines[:5], b"{]\n", *lines[6:]], 4, "position 5 is unreadable"),
        (lambda lines: lines[:-3] + lines[-1:], 8, "events are missing between 8 and 10"),
        (lambda lines: [*lines, lines[3]], 10, "bytes follow the end at position 10"),
        (lambda lines: [*lines[:5], lines[4], *lines[5:]], 4, "position 5 is missing: 4 stands there"),
    ],
)  # fmt: skip
async def test_damage_is_reported_with_its_position_after_everything_before_it(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], readable: int, message: str
) -> None:
    log, _ = await filled(10)
    await seal(log, tmp_path)
    [file] = segments(tmp_path)
    rewrite(file, change)
    found, said = await up_to_damage(FileLog(tmp_path))
    assert found == list(range(1, readable + 1))
    assert message in said
    assert file.name in said


async def test_a_missing_segment_is_a_gap(tmp_path: Path) -> None:
    log, _ = await filled(30)
    await seal(log, tmp_path, size=10)
    segments(tmp_path)[1].unlink()
    sealed = FileLog(tmp_path)
    found, message = await up_to_damage(sealed)
    assert found == list(range(1, 11))
    assert "positions 11 to 20 are missing" in message
    assert [e.position for e in await sealed.read(20)] == list(range(21, 31))


async def test_a_segment_of_another_history_breaks_the_chain_between_files(tmp_path: Path) -> None:
    log, _ = await filled(30)
    await seal(log, tmp_path / "a", size=10)
    other = MemoryLog("run-1")
    pen = Pen("run-1", "another", await other.claim("another"))
    await other.append([pen.prepare() for _ in range(30)])
    await seal(other, tmp_path / "b", size=10)
    shutil.copy(segments(tmp_path / "b")[1], segments(tmp_path / "a")[1])
    found, message = await up_to_damage(FileLog(tmp_path / "a"))
    assert found == list(range(1, 11))
    assert "the hash chain breaks at position 11" in message


async def test_an_export_reads_like_the_log_and_tells_when_it_is_torn(tmp_path: Path) -> None:
    log, _ = await filled(40)
    path = tmp_path / "run.jsonl"
    assert await export_jsonl(log, path) == 40
    exported = FileLog(path)
    assert (exported.run, await exported.tail()) == ("run-1", 40)
    assert await exported.read(0) == await log.read(0)
    assert await export_jsonl(exported, tmp_path / "again.jsonl", upto=7) == 7
    assert await positions(FileLog(tmp_path / "again.jsonl")) == list(range(1, 8))
    os.truncate(path, path.stat().st_size - 500)
    found, message = await up_to_damage(FileLog(path))
    assert found == list(range(1, len(found) + 1))
    assert f"torn after position {found[-1]}" in message


async def test_a_file_that_is_no_log_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(LogCorruptError, match="no readable header"):
        FileLog(path)
    path.write_text('{"segue_log":9,"run":"r","first":1,"before":""}\n')
    with pytest.raises(LogError, match="format 9"):
        FileLog(path)


# trimming and the joined reader


@pytest.fixture
async def run_dir(tmp_path: Path, log_server: LogServer) -> AsyncIterator[Path]:
    folder = tmp_path / f"run-{os.urandom(4).hex()}"
    folder.mkdir()
    describe(folder, log_server.url)
    yield folder
    await log_server.close_logs()


def describe(run_dir: Path, log_url: str) -> None:
    (run_dir / "config.json").write_bytes(msgspec.json.encode(Config()))
    endpoints = Endpoints(
        log_url=log_url,
        router_url="",
        session_urls=(),
        ray_address="",
        ray_temp_dir="",
        admin_token="",
        worker_token="",
    )
    (run_dir / "endpoints.json").write_bytes(msgspec.json.encode(endpoints))


async def test_trimming_keeps_what_is_not_sealed_and_what_is_not_acknowledged(
    run_dir: Path, log_server: LogServer
) -> None:
    log = await log_server.open(run_dir.name)
    pen = Pen(log.run, "w", await log.claim("w"))
    await log.append([pen.prepare(targets=("t", "unread", "slow")) for _ in range(20)])
    await log.receive("slow", "c", limit=4)
    await log.acknowledge("slow", [1, 2, 3, 4])
    await log.receive("t", "c", limit=10)
    await log.acknowledge("t", [1, 2, 4, 5])
    folder = segment_dir(run_dir)
    await seal(log, folder, 15)
    with pytest.raises(LogCorruptError, match="up to 15"):
        await trim(log, folder, 17)
    await trim(log, folder, 16)
    assert await log.tail() == 20
    assert await positions(log, 15) == [16, 17, 18, 19, 20]
    for after in (0, 14):
        with pytest.raises(LogTrimmedError):
            await log.read(after)
    again = await log_server.open(run_dir.name)
    assert [d.event.position for d in await again.receive("t", "c", limit=99)] == [3, 6, 7, 8, 9, 10]
    assert [d.event.position for d in await again.receive("t", "c", limit=99)] == list(range(11, 21))
    assert len(await again.receive("unread", "c", limit=99)) == 20
    assert [d.event.position for d in await again.receive("slow", "c", limit=99)] == list(range(5, 21))
    assert await log.call("XLEN", f"{{{log.run}}}:to:t") == 18


async def test_what_differs_from_its_segment_is_not_trimmed(run_dir: Path, log_server: LogServer) -> None:
    log = await log_server.open(run_dir.name)
    pen = Pen(log.run, "w", await log.claim("w"))
    await log.append([pen.prepare() for _ in range(20)])
    other, _ = await filled(20, run=run_dir.name + "x")
    other.run = run_dir.name
    await seal(other, segment_dir(run_dir))
    with pytest.raises(LogCorruptError, match="differs"):
        await trim(log, segment_dir(run_dir), 11)
    with pytest.raises(LogCorruptError, match="differs"):
        await open_reader(run_dir)
    assert await positions(log) == list(range(1, 21))


async def test_a_run_is_read_from_segments_first_and_then_live(run_dir: Path, log_server: LogServer) -> None:
    log = await log_server.open(run_dir.name)
    pen = Pen(log.run, "w", await log.claim("w"))
    await log.append([pen.prepare() for _ in range(30)])
    whole = await log.read(0)
    await seal(log, segment_dir(run_dir), 20, size=10)
    await trim(log, segment_dir(run_dir), 15)
    reader = await open_reader(run_dir)
    assert (reader.run, reader.is_live, await reader.tail()) == (run_dir.name, True, 30)
    assert await positions(reader) == list(range(1, 31))
    assert (await reader.read(0, limit=5)) == whole[:5]
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(reader.read(30, wait_s=20.0))
        await asyncio.sleep(0.05)
        await log.append([pen.prepare()])
    assert [e.position for e in waiting.result()] == [31]
    await seal(log, segment_dir(run_dir), size=10)
    await trim(log, segment_dir(run_dir), 31)
    assert await positions(reader, 20) == list(range(21, 32))
    with pytest.raises(LogCorruptError):
        await reader.read(99)
    await reader.close()


async def test_a_dead_run_is_read_from_its_append_only_file_and_left_as_it_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "run-1"
    run_dir.mkdir()
    own = LogServer(run_dir)
    describe(run_dir, own.url)
    await own.start()
    log = await own.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare() for _ in range(20)])
    await seal(log, segment_dir(run_dir), 10)
    await own.close_logs()
    own.kill()
    before = {p: p.read_bytes() for p in sorted((run_dir / "log" / "aof").iterdir())}
    reader = await open_reader(run_dir)
    try:
        assert (reader.is_live, await reader.tail()) == (False, 20)
        assert await positions(reader) == list(range(1, 21))
    finally:
        await reader.close()
    assert {p: p.read_bytes() for p in sorted((run_dir / "log" / "aof").iterdir())} == before


async def test_an_ended_run_without_a_server_is_read_from_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "LIVE_TIMEOUT_S", 0.2)
    run_dir = tmp_path / "run-1"
    run_dir.mkdir()
    describe(run_dir, f"unix://{tmp_path}/gone.sock")
    log, _ = await filled(12)
    await seal(log, segment_dir(run_dir), size=5)
    for where in (run_dir, segment_dir(run_dir)):
        reader = await open_reader(where)
        assert (reader.run, reader.is_live, await reader.tail()) == ("run-1", False, 12)
        assert await positions(reader) == list(range(1, 13))
        await reader.close()


async def test_where_there_is_nothing_to_read_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LogError, match="neither a live log nor anything sealed"):
        await open_reader(tmp_path / "nowhere")
    run_dir = tmp_path / "run-1"
    run_dir.mkdir()
    describe(run_dir, f"unix://{tmp_path}/gone.sock")
    monkeypatch.setattr(reader_module, "LIVE_TIMEOUT_S", 0.2)
    with pytest.raises(LogUnavailable, match=r"gone\.sock"):
        await open_reader(run_dir)


async def test_a_url_finds_its_only_run_or_asks_which(tmp_path: Path) -> None:
    own = LogServer(tmp_path)
    try:
        await own.start()
        with pytest.raises(LogError, match=r"0 runs \(none\)"):
            await open_reader(own.url)
        for run in ("run-1", "run-2"):
            log = await own.open(run)
            pen = Pen(run, "w", await log.claim("w"))
            await log.append([pen.prepare()])
            reader = await open_reader(own.url, "" if run == "run-1" else run)
            assert (reader.run, await reader.tail()) == (run, 1)
            await reader.close()
        with pytest.raises(LogError, match="run-1, run-2"):
            await open_reader(own.url)
    finally:
        await own.close_logs()
        own.kill()
