"""Move a log from the server into sealed files, and let the server forget what is safe there.

Invariants: a segment appears under its name whole or not at all (temporary name, fsync, rename, fsync of the folder);
sealing again goes on where the files end; nothing is trimmed from the live log that does not stand in a segment with
the very same bytes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import zstandard

from segue.errors import LogCorruptError
from segue.events import codec
from segue.events.codec import Recorded
from segue.log.file import FileLog, LineWriter, chain_start, segment_name
from segue.log.redis import RedisLog

SEGMENT_EVENTS = 4096
"""Events of a full segment: about 2 MB of JSON, so that one seek into a sealed log costs some 10 ms."""
READ_LIMIT = 1024


class Readable(Protocol):
    """The reading side of an EventLog."""

    run: str

    async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]: ...

    async def tail(self) -> int: ...

    async def close(self) -> None: ...


async def _between(log: Readable, after: int, upto: int) -> AsyncIterator[Recorded]:
    while after < upto:
        for event in await log.read(after, limit=min(READ_LIMIT, upto - after)):
            yield event
            after = event.position


def has_segments(folder: Path) -> bool:
    """Whether anything was sealed into `folder`."""
    return any(folder.glob("segment-*.jsonl.zst"))


async def seal(
    log: Readable, folder: Path, upto: int | None = None, *, full_only: bool = False, size: int = SEGMENT_EVENTS
) -> int:
    """Write what is not yet sealed, up to position `upto` (default: the log's tail), as segments of `size` events.

    The last segment is shorter unless `full_only` leaves the rest for the next call (for sealing while the run goes
    on). Returns the last sealed position, 0 if there is none. Raises LogCorruptError if the files are of another run or
    damaged at their end.
    """
    done, chain = await _sealed_so_far(folder, log.run)
    end = await log.tail() if upto is None else upto
    while done < end and (end - done >= size or not full_only):
        writer = LineWriter(log.run, done + 1, chain)
        lines = [writer.header()]
        async for event in _between(log, done, min(done + size, end)):
            lines.append(writer.add(event))
        lines.append(writer.footer())
        _write_atomically(folder, segment_name(writer.first, writer.last), b"".join(lines))
        done, chain = writer.last, writer.chain
    return done


async def _sealed_so_far(folder: Path, run: str) -> tuple[int, str]:
    """(last position, its chain) of the segments in `folder`, which is made and freed of torn temporary files."""
    _prepare(folder)
    if not has_segments(folder):
        return 0, chain_start(run)
    files = FileLog(folder)
    if files.run != run:
        raise LogCorruptError(f"{folder} holds segments of run {files.run}, not of {run}")
    return await files.tail(), files.end_chain()


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".segment-*"):
        left.unlink()


def _write_atomically(folder: Path, name: str, text: bytes) -> None:
    temporary = folder / f".{name}"
    with temporary.open("wb") as file:
        file.write(zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / name)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def export_jsonl(log: Readable, path: Path, *, upto: int | None = None) -> int:
    """Write the whole log, up to position `upto`, as one file of JSON lines, which `FileLog` reads. Returns its end."""
    writer = LineWriter(log.run, 1, chain_start(log.run))
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        file.write(writer.header())
        async for event in _between(log, 0, await log.tail() if upto is None else upto):
            file.write(writer.add(event))
        file.write(writer.footer())
    temporary.rename(path)
    return writer.last


async def trim(log: RedisLog, folder: Path, below: int) -> None:
    """Let the live log forget positions < `below`, all of which must stand in the segments of `folder`.

    Commands that were not acknowledged stay in their targets' streams. Raises LogCorruptError, and trims nothing, if
    the segments end before `below` or if their newest event to be trimmed differs from the live one.
    """
    files = FileLog(folder)
    sealed = await files.tail()
    files.end_chain()
    if files.run != log.run or below > sealed + 1:
        raise LogCorruptError(f"{folder} holds run {files.run} up to {sealed}: {log.run} cannot be trimmed to {below}")
    if below < 2:
        return
    mine, theirs = await log.read(below - 2, limit=1), await files.read(below - 2, limit=1)
    if codec.encode(mine[0].envelope) != codec.encode(theirs[0].envelope):
        raise LogCorruptError(f"position {below - 1} differs between {log.url} and {folder}")
    await log.trim(below)
