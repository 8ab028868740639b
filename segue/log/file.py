"""Sealed segments: the log as files that never change again, and a reader over them.

A segment is zstd-compressed JSON lines: a header, one line per event, a footer. Each event line carries the chain: the
sha256 of the line before's chain and the event's bytes, cut to 128 bits. So a torn file (no footer), a missing line (a
gap in the positions), a changed one (the chain breaks) and a segment that belongs to another log (its header's chain
is not the end of the one before) are all told apart, with the position where it happens. Reading hands out everything
before the damage and then raises; nothing is ever skipped.

An exported log (`segue.log.sealing.export_jsonl`) is the same lines in one uncompressed file.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import zstandard

from segue.errors import LogCorruptError, LogError, LogSealedError
from segue.events import codec
from segue.events.codec import Recorded
from segue.log.protocol import Appended, Delivery, Prepared

FORMAT = 1


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line. `before`: chain of the event before `first`; for position 1 it is derived from the run id."""

    segue_log: int
    run: str
    first: int
    before: str


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    position: int
    chain: str
    event: msgspec.Raw


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Last line: without it the file is torn."""

    end: int
    chain: str


_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(Line)
_FOOTER = msgspec.json.Decoder(Footer)
_ENCODER = msgspec.json.Encoder()


def chain_start(run: str) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:32]


def chain_next(chain: str, data: bytes) -> str:
    return hashlib.sha256(chain.encode() + data).hexdigest()[:32]


class LineWriter:
    """Turns events into the lines of one file, in order: header(), add() for each, footer()."""

    def __init__(self, run: str, first: int, before: str) -> None:
        self.run, self.first, self.before = run, first, before
        self.last, self.chain = first - 1, before

    def header(self) -> bytes:
        return _ENCODER.encode(Header(FORMAT, self.run, self.first, self.before)) + b"\n"

    def add(self, event: Recorded) -> bytes:
        if event.position != self.last + 1:
            raise LogCorruptError(f"position {self.last + 1} is missing: {event.position} follows {self.last}")
        data = codec.encode(event.envelope)
        self.last, self.chain = event.position, chain_next(self.chain, data)
        return _ENCODER.encode(Line(self.last, self.chain, msgspec.Raw(data))) + b"\n"

    def footer(self) -> bytes:
        return _ENCODER.encode(Footer(self.last, self.chain)) + b"\n"


@dataclass(frozen=True, slots=True)
class Segment:
    """A loaded file. `events` are the good ones, from position `first`; `damage` says what comes after them, or ""."""

    run: str
    first: int
    before: str
    after: str
    events: tuple[bytes, ...]
    damage: str

    @property
    def last(self) -> int:
        return self.first + len(self.events) - 1


def load_segment(path: Path) -> Segment:
    """Read and check one file. Raises LogCorruptError if not even its header can be read."""
    lines = _text(path).split(b"\n")
    torn_line = lines.pop()  # what follows the last newline: b"" in a whole file
    try:
        header = _HEADER.decode(lines[0])
    except (msgspec.MsgspecError, IndexError) as error:
        raise LogCorruptError(f"{path}: no readable header: {error}") from error
    if header.segue_log != FORMAT:
        raise LogError(f"{path} has format {header.segue_log}; this build reads format {FORMAT}")
    chain, events = header.before, list[bytes]()
    damage = ""
    for raw in lines[1:]:
        position = header.first + len(events)
        if raw.startswith(b'{"end"'):
            damage = _check_footer(raw, position - 1, chain)
            if not damage and (raw is not lines[-1] or torn_line):
                damage = f"bytes follow the end at position {position - 1}"
            break
        try:
            line = _LINE.decode(raw)
        except msgspec.MsgspecError as error:
            damage = f"position {position} is unreadable: {error}"
            break
        data = bytes(line.event)
        if line.position != position:
            damage = f"position {position} is missing: {line.position} stands there"
        elif line.chain != chain_next(chain, data):
            damage = f"the hash chain breaks at position {position}"
        if damage:
            break
        chain = line.chain
        events.append(data)
    else:
        damage = f"torn after position {header.first + len(events) - 1}"
    return Segment(header.run, header.first, header.before, chain, tuple(events), damage and f"{path}: {damage}")


def _check_footer(raw: bytes, last: int, chain: str) -> str:
    try:
        footer = _FOOTER.decode(raw)
    except msgspec.MsgspecError as error:
        return f"the end after position {last} is unreadable: {error}"
    return "" if (footer.end, footer.chain) == (last, chain) else f"events are missing between {last} and {footer.end}"


def _text(path: Path) -> bytes:
    """The file's lines, uncompressed as far as they go."""
    data = path.read_bytes()
    if path.suffix != ".zst":
        return data
    inflate, parts = zstandard.ZstdDecompressor().decompressobj(), list[bytes]()
    try:
        for start in range(0, len(data), 65_536):
            parts.append(inflate.decompress(data[start : start + 65_536]))
    except zstandard.ZstdError:
        parts.append(b"")  # what came before is checked line by line; the missing footer tells the rest
    return b"".join(parts)


def segment_name(first: int, last: int) -> str:
    return f"segment-{first:012d}-{last:012d}.jsonl.zst"


class FileLog:
    """EventLog over a folder of segments, or over one file: reads like the live one and takes no appends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded: dict[int, Segment] = {}
        self._ends: dict[int, str] = {}  # chains at the last positions of the segments read so far
        if path.is_dir():
            self._files = sorted(path.glob("segment-*.jsonl.zst"))
            if not self._files:
                raise LogError(f"{path} holds no sealed segments")
            spans = [tuple(int(part) for part in f.name.split(".")[0].split("-")[1:]) for f in self._files]
            self._firsts, self._lasts = [s[0] for s in spans], [s[1] for s in spans]
            self.run = self._load(0).run
        else:
            self._files, self._firsts = [path], [1]
            segment = self._load(0)
            self.run, self._firsts, self._lasts = segment.run, [segment.first], [segment.last]

    def _load(self, index: int) -> Segment:
        """The segment, checked in itself and against the end of the one before if that was read."""
        segment = self._loaded.get(index)
        if segment is None:
            segment = load_segment(self._files[index])
            self._loaded = {index: segment}  # one at a time: a segment is some MB
        self._ends[segment.last] = segment.after
        before = chain_start(segment.run) if segment.first == 1 else self._ends.get(segment.first - 1, segment.before)
        if segment.first != self._firsts[index] and self.path.is_dir():
            raise LogCorruptError(f"{self._files[index]} starts at position {segment.first}, not where its name says")
        if segment.before != before:
            raise LogCorruptError(f"the hash chain breaks at position {segment.first}: {self._files[index]}")
        return segment

    async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]:
        """As EventLog.read; a sealed log never grows, so nothing is waited for.

        Raises LogCorruptError where a file is damaged or missing, after everything before it was handed out.
        """
        if after >= self._lasts[-1]:
            return self._at_end(after)
        index = bisect_right(self._firsts, after + 1) - 1
        if index < 0 or after + 1 > self._lasts[index]:
            following = self._firsts[index + 1]
            raise LogCorruptError(f"positions {after + 1} to {following - 1} are missing in {self.path}")
        segment = self._load(index)
        skip = after + 1 - segment.first
        chosen = segment.events[skip : skip + limit]
        if not chosen:
            raise LogCorruptError(segment.damage or f"{self._files[index]} ends early, at position {segment.last}")
        return [codec.decode(after + 1 + i, data) for i, data in enumerate(chosen)]

    def _at_end(self, after: int) -> list[Recorded]:
        if after > self._lasts[-1]:
            raise LogCorruptError(f"read after {after}, but {self.path} ends at {self._lasts[-1]}")
        damage = self._load(len(self._files) - 1).damage
        if damage:
            raise LogCorruptError(damage)
        return []

    async def tail(self) -> int:
        """The last position that the files promise (a damaged one raises when read)."""
        return self._lasts[-1]

    def end_chain(self) -> str:
        """The chain after the last event. Raises LogCorruptError if the last segment is damaged."""
        segment = self._load(len(self._files) - 1)
        if segment.damage:
            raise LogCorruptError(segment.damage)
        return segment.after

    def _sealed(self) -> NoReturn:
        raise LogSealedError(f"{self.path} is sealed: it can only be read")

    async def claim(self, producer: str) -> int:
        self._sealed()

    async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
        self._sealed()

    async def receive(self, target: str, consumer: str, *, limit: int = 16, wait_s: float = 0.0) -> list[Delivery]:
        self._sealed()

    async def acknowledge(self, target: str, positions: Sequence[int]) -> None:
        self._sealed()

    async def touch(self, target: str, consumer: str, positions: Sequence[int]) -> None:
        self._sealed()

    async def reclaim(self, target: str, consumer: str, *, min_idle_s: float, limit: int = 16) -> list[Delivery]:
        self._sealed()

    async def bury(self, target: str, position: int, reason: str) -> None:
        self._sealed()

    async def buried(self, target: str) -> list[tuple[int, str]]:
        self._sealed()

    async def close(self) -> None:
        self._loaded.clear()
