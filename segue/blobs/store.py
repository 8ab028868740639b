"""A content-addressed store in a folder: `root/ab/cd/abcd...`, one file per blob, shared by all processes of a run.

Invariants: a file under its digest is whole, because it was written under a temporary name and renamed; a blob never
changes, so writers need no lock and a repeated `put` is a no-op; bytes that leave the store hash to the digest they
were asked for; a digest is checked before it becomes a path, so no reference can point outside the root.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
from pathlib import Path

from segue.errors import BlobError
from segue.events.base import INLINE_LIMIT_BYTES, Bulk

_DIGEST = re.compile(r"[0-9a-f]{64}")
_THREAD_FROM_BYTES = 256 * 1024
"""Hashing and writing less than this takes less time than a hand-over to a thread and back."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class BlobStore:
    """`fsync`: make each blob survive a power cut, not only the death of its writer."""

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self.root = root
        self._incoming = root / "incoming"
        self._fsync = fsync
        self._incoming.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where the blob is or would be. Raises BlobError for anything but 64 lower-case hex digits."""
        if not _DIGEST.fullmatch(digest):
            raise BlobError(f"'{digest[:80]}' is not a blob digest (64 lower-case hex digits)")
        return self.root / digest[:2] / digest[2:4] / digest

    def put(self, data: bytes) -> str:
        """Store `data` and return its sha256 hex. Raises BlobError if there is no room; the store stays as it was."""
        digest = hashlib.sha256(data).hexdigest()
        target = self.path(digest)
        temporary = self._incoming / f"{digest[:16]}-{secrets.token_hex(8)}"
        try:
            if _size(target) == len(data):
                os.utime(target)  # written again: `discard` must not take it for old
                return digest
            try:
                self._write(temporary, data)
                _move(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            if self._fsync:
                _sync_folder(target.parent)
        except OSError as error:
            remedy = f"; free space under {self.root} and repeat" if error.errno in _NO_ROOM else ""
            raise BlobError(
                f"cannot store {len(data)} bytes at {target}: {os.strerror(error.errno or 0)}{remedy}"
            ) from error
        return digest

    def get(self, digest: str) -> bytes:
        """The blob's bytes, proved by their hash. Raises BlobError if it is missing or damaged."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BlobError(f"blob {digest} is missing from {self.root}") from None
        except OSError as error:
            raise BlobError(f"blob {path} cannot be read: {os.strerror(error.errno or 0)}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobError(f"blob {path} is damaged: its {len(data)} bytes do not hash to its name")
        return data

    def bulk(self, data: bytes) -> Bulk:
        """A reference to `data` for an event: inline up to INLINE_LIMIT_BYTES, otherwise stored. Raises as `put`."""
        if len(data) <= INLINE_LIMIT_BYTES:
            return Bulk(hashlib.sha256(data).hexdigest(), len(data), data)
        return Bulk(self.put(data), len(data))

    def read(self, bulk: Bulk) -> bytes:
        """The bytes of a reference, proved by size and hash. Raises BlobError."""
        data = self.get(bulk.digest) if bulk.inline is None else bulk.inline
        if len(data) != bulk.size:
            raise BlobError(f"blob {bulk.digest} has {len(data)} bytes, its reference says {bulk.size}")
        if bulk.inline is not None and hashlib.sha256(data).hexdigest() != bulk.digest:
            raise BlobError(f"inline blob {bulk.digest} is damaged: its bytes do not hash to its digest")
        return data

    def discard(self, digest: str, *, written_before_wall_s: float) -> int:
        """Remove a blob unless it was written since; returns the bytes that became free, 0 if it stayed."""
        path = self.path(digest)
        try:
            found = path.stat()
            if found.st_mtime >= written_before_wall_s:
                return 0
            path.unlink()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise BlobError(f"blob {path} cannot be removed: {os.strerror(error.errno or 0)}") from error
        return found.st_size

    async def put_async(self, data: bytes) -> str:
        """`put`, off the event loop where it would hold it."""
        if self._fsync or len(data) >= _THREAD_FROM_BYTES:
            return await asyncio.to_thread(self.put, data)
        return self.put(data)

    async def bulk_async(self, data: bytes) -> Bulk:
        """`bulk`, off the event loop where it would hold it."""
        if len(data) <= INLINE_LIMIT_BYTES:
            return self.bulk(data)
        return Bulk(await self.put_async(data), len(data))

    async def read_async(self, bulk: Bulk) -> bytes:
        """`read`, off the event loop where it would hold it."""
        if bulk.inline is None and bulk.size >= _THREAD_FROM_BYTES:
            return await asyncio.to_thread(self.read, bulk)
        return self.read(bulk)

    def _write(self, path: Path, data: bytes) -> None:
        with path.open("xb", buffering=0) as file:
            rest = memoryview(data)
            while rest:  # a raw write may be short, above 2 GiB always
                rest = rest[file.write(rest) :]
            if self._fsync:
                os.fsync(file.fileno())


def _size(path: Path) -> int | None:
    """A blob of another size than its bytes is the remains of a power cut and is written again."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _move(source: Path, target: Path) -> None:
    """Most folders are there already, and each call to the system costs as much as hashing the bytes."""
    try:
        source.replace(target)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
