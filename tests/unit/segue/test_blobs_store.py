from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from segue.blobs import BlobStore
from segue.errors import BlobError
from segue.events.base import INLINE_LIMIT_BYTES, Bulk


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("fsync", [False, True])
def test_a_blob_comes_back_and_lies_in_two_levels_of_folders(tmp_path: Path, fsync: bool) -> None:
    store = BlobStore(tmp_path, fsync=fsync)
    digest = store.put(b"hello")
    assert digest == hashlib.sha256(b"hello").hexdigest()
    assert store.get(digest) == b"hello"
    assert files(tmp_path) == [tmp_path / digest[:2] / digest[2:4] / digest]


def test_a_repeated_put_writes_nothing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    path = store.path(store.put(b"same"))
    os.utime(path, (1.0, 1.0))
    before = path.stat()
    store.put(b"same")
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime > 1.0, "old no longer: somebody is about to refer to it"


def test_the_empty_blob_is_a_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert store.get(store.put(b"")) == b""


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match=f"{'0' * 64} is missing from {tmp_path}"):
        BlobStore(tmp_path).get("0" * 64)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"good")
    store.path(digest).write_bytes(b"evil")
    with pytest.raises(BlobError, match="is damaged"):
        store.get(digest)


def test_a_file_cut_by_a_power_failure_is_written_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"whole")
    store.path(digest).write_bytes(b"")
    store.put(b"whole")
    assert store.get(digest) == b"whole"


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", "/" * 64, "g" * 64])
def test_nothing_but_a_digest_becomes_a_path(tmp_path: Path, digest: str) -> None:
    store = BlobStore(tmp_path)
    for call in (store.get, store.path, lambda d: store.read(Bulk(d, 1))):
        with pytest.raises(BlobError, match="is not a blob digest"):
            call(digest)


def test_small_bytes_stay_in_the_event_and_large_ones_go_to_the_store(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    small, large = bytes(INLINE_LIMIT_BYTES), bytes(INLINE_LIMIT_BYTES + 1)
    inline, stored = store.bulk(small), store.bulk(large)
    assert inline == Bulk(hashlib.sha256(small).hexdigest(), len(small), small)
    assert stored == Bulk(hashlib.sha256(large).hexdigest(), len(large), None)
    assert len(files(tmp_path)) == 1
    assert store.read(inline) == small
    assert store.read(stored) == large


def test_a_reference_that_lies_is_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"abc")
    with pytest.raises(BlobError, match="has 3 bytes, its reference says 4"):
        store.read(Bulk(digest, 4))
    with pytest.raises(BlobError, match="inline blob .* is damaged"):
        store.read(Bulk(digest, 3, b"xyz"))


async def test_async_forms_agree_and_use_a_thread_only_for_large_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    threads: list[int] = []
    plain = BlobStore.path

    def watched(self: BlobStore, digest: str) -> Path:
        threads.append(threading.get_ident())
        return plain(self, digest)

    monkeypatch.setattr(BlobStore, "path", watched)
    for size in (10, INLINE_LIMIT_BYTES + 1):
        data = os.urandom(size)
        bulk = await store.bulk_async(data)
        assert await store.put_async(data) == bulk.digest
        assert await store.read_async(bulk) == data
    assert set(threads) == {threading.get_ident()}
    threads.clear()
    data = os.urandom(1024 * 1024)
    assert await store.read_async(await store.bulk_async(data)) == data
    assert threading.get_ident() not in threads


def test_many_writers_of_one_blob_leave_one_whole_file(tmp_path: Path) -> None:
    data = os.urandom(2_000_000)
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda _: BlobStore(tmp_path).put(data), range(24)))
    assert len(digests) == 1
    assert len(files(tmp_path)) == 1
    assert BlobStore(tmp_path).get(digests.pop()) == data


def test_a_full_disk_is_an_error_with_the_remedy_and_the_store_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    kept = store.put(b"kept")

    def full(self: BlobStore, path: Path, data: bytes) -> None:
        path.write_bytes(data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "_write", full)
        with pytest.raises(
            BlobError, match=f"cannot store 5 bytes at {tmp_path}.*No space left.*free space under {tmp_path}"
        ):
            store.put(b"large")
    assert files(tmp_path) == [store.path(kept)]
    assert store.get(store.put(b"large")) == b"large"


def test_a_write_that_the_kernel_cuts_short_leaves_nothing_behind(tmp_path: Path) -> None:
    limited = (
        "import sys, pathlib; from segue.blobs import BlobStore; from segue.errors import BlobError\n"
        "try: BlobStore(pathlib.Path(sys.argv[1])).put(bytes(100_000))\n"
        "except BlobError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "cannot store 100000 bytes" in done.stdout
    assert "free space" in done.stdout
    assert files(tmp_path) == []


async def test_a_cancelled_put_leaves_the_store_whole(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    data = os.urandom(8_000_000)
    task = asyncio.create_task(store.put_async(data))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.get_running_loop().shutdown_default_executor()
    for path in files(tmp_path):
        assert store.get(path.name) == data
