"""The embedded server: durability, left-overs, and what people are told when something is wrong."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from segue.errors import ConflictError, LogCorruptError, LogError, LogUnavailable
from segue.log import Appended, Writer, connect, redis, server
from segue.log.redis import RedisLog, public_url
from segue.testing import alarm
from segue.testing.events import Pen
from segue.testing.log_fixtures import LogServer


@pytest.fixture
def short_dir(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose path is short enough for a unix socket, however long pytest's is."""
    folder = Path(os.path.realpath("/tmp")) / f"sg{os.getpid()}{abs(hash(tmp_path)) % 10**8}" / "run-1"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.parent)


@pytest.fixture
async def own_server(short_dir: Path) -> AsyncIterator[LogServer]:
    made = LogServer(short_dir, fsync="always")
    try:
        yield made
    finally:
        await made.close_logs()
        made.kill()


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed_under_load(own_server: LogServer) -> None:
    await own_server.start()
    acknowledged: dict[int, int] = {}
    for round_number in range(3):
        log = await own_server.open("run-1")
        pen = Pen("run-1", "w", await log.claim("w"))
        if round_number:
            for position, seq in acknowledged.items():
                [event] = await log.read(position - 1, limit=1)
                assert event.id.seq == seq
        acknowledged.clear()

        async def write(log: RedisLog, pen: Pen) -> None:
            while True:
                batch = [pen.prepare(targets=("t",)) for _ in range(20)]
                for item, answer in zip(batch, await log.append(batch), strict=True):
                    assert isinstance(answer, Appended)
                    acknowledged[answer.position] = item.seq

        async def kill_later() -> None:
            while len(acknowledged) < 200:
                await asyncio.sleep(0.001)
            own_server.kill()

        assert isinstance(log, RedisLog)
        killing = asyncio.create_task(kill_later())
        with pytest.raises(LogUnavailable):
            await write(log, pen)
        await killing
        assert len(acknowledged) >= 200
        await own_server.start()
    log = await own_server.open("run-1")
    assert await log.tail() >= max(acknowledged)
    events = await log.read(0, limit=10**6)
    assert [e.position for e in events] == list(range(1, len(events) + 1))
    deliveries = await log.receive("t", "c", limit=10**6)
    assert [d.event.position for d in deliveries] == [e.position for e in events]


async def test_epochs_windows_keys_and_pending_deliveries_survive_a_kill(own_server: LogServer) -> None:
    from segue.events.work import CloseAdmission, GroupCompleted

    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    batch = [
        pen.prepare(CloseAdmission(pause=1), targets=("t",)),
        pen.prepare(GroupCompleted(purpose="train", group=1, sample_ids=("a",)), expect=("s", 0)),
    ]
    await log.append(batch)
    assert len(await log.receive("t", "c")) == 1
    own_server.kill()
    await own_server.start()
    log = await own_server.open("run-1")
    assert await log.append(batch) == [Appended(1, True), Appended(2, True)]
    [conflict, counted] = await log.append(
        [
            pen.prepare(GroupCompleted(purpose="train", group=1, sample_ids=("b",))),
            pen.prepare(expect=("s", 1)),
        ]
    )
    assert isinstance(conflict, ConflictError)
    assert counted == Appended(3, False)
    assert [(d.event.position, d.deliveries) for d in await log.receive("t", "c")] == [(1, 2)]
    assert await log.claim("w") == 2


async def test_a_writer_outlives_a_restart_of_the_server(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    async with await Writer.open(log, "w") as writer:
        await writer.append(alarm())
        own_server.kill()
        waiting = asyncio.create_task(writer.append(alarm()))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await own_server.start()
        written = await waiting
        assert (written.position, (await writer.append(alarm())).position) == (2, 3)


async def test_a_consumer_goes_on_after_a_restart_of_the_server(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare(targets=("t",)), pen.prepare(targets=("t",))])
    assert [d.event.position for d in await log.receive("t", "c", limit=1)] == [1]
    receiving = asyncio.create_task(log.receive("elsewhere", "c", wait_s=20.0))
    await asyncio.sleep(0.05)
    own_server.kill()
    with pytest.raises(LogUnavailable):
        await receiving
    with pytest.raises(LogUnavailable):
        await log.receive("t", "c")
    await own_server.start()
    assert [(d.event.position, d.deliveries) for d in await log.receive("t", "c")] == [(2, 1)]


async def test_a_delivery_whose_answer_was_lost_is_found_among_the_pending_ones(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare(targets=("t",))])
    assert len(await log.receive("t", "c")) == 1
    await log.append([pen.prepare(targets=("t",))])
    whole = log.call

    async def loses_the_answer(*command: str | bytes | int, wait_s: float = 0.0) -> object:
        reply = await whole(*command, wait_s=wait_s)
        if command[0] == "XREADGROUP":
            raise LogUnavailable("the connection broke")
        return reply

    log.call = loses_the_answer  # type: ignore[method-assign]
    with pytest.raises(LogUnavailable):
        await log.receive("t", "c")
    log.call = whole  # type: ignore[method-assign]
    assert [(d.event.position, d.deliveries) for d in await log.receive("t", "c")] == [(2, 2)]
    assert await log.receive("t", "c") == []


async def test_a_command_trimmed_before_its_end_becomes_a_dead_letter(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare(targets=("t",)), pen.prepare(targets=("t",))])
    await log.receive("t", "c")
    await log.call("XDEL", "{run-1}:to:t", "1-0")
    after = await own_server.open("run-1")
    assert [d.event.position for d in await after.receive("t", "c")] == [2]
    assert await after.buried("t") == [(1, "trimmed from the stream before it was acknowledged")]


async def test_all_keys_of_a_run_share_one_hash_tag_and_runs_do_not_meet(own_server: LogServer) -> None:
    await own_server.start()
    one, two = await own_server.open("run-1"), await own_server.open("run-10")
    pen = Pen("run-1", "w", await one.claim("w"))
    await one.append([pen.prepare(targets=("t",), expect=("s", 0))])
    await one.receive("t", "c")
    await one.bury("t", 1, "why")
    keys = await one.call("KEYS", "*")
    assert keys
    assert all(key.startswith(b"{run-1}:") for key in keys)
    assert (await two.tail(), await two.read(0), await two.receive("t", "c")) == (0, [], [])
    assert await one.runs() == ["run-1"]


@pytest.mark.parametrize("run", ["", "a{b", "a}b"])
async def test_a_run_id_that_would_break_the_hash_tag_is_refused(own_server: LogServer, run: str) -> None:
    with pytest.raises(LogError, match="run id"):
        await connect(own_server.url, run)


# reaching it


async def test_an_unreachable_server_is_named_with_its_remedy_and_without_its_password() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(LogUnavailable) as caught:
        await connect(f"redis://me:secret@127.0.0.1:{port}/0", "run-1", connect_timeout_s=0.3)
    message = str(caught.value)
    assert f"redis://me:***@127.0.0.1:{port}/0" in message
    assert "[log] url" in message
    assert "REDIS_URL" in message
    assert "secret" not in message
    assert "\n" not in message


async def test_a_server_that_accepts_but_never_answers_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    mute = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    async with mute, asyncio.timeout(5.0):
        with pytest.raises(LogUnavailable, match="no log server answers"):
            await connect(f"redis://127.0.0.1:{port}", "run-1", connect_timeout_s=0.3)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1", "127.0.0.1:6379", "redis://127.0.0.1/?db=x"])
async def test_a_url_that_names_no_redis_is_refused_at_once(url: str) -> None:
    with pytest.raises(LogError, match="REDIS_URL"):
        await connect(url, "run-1", connect_timeout_s=0.3)


def test_urls_lose_their_password_and_nothing_else() -> None:
    assert public_url("redis://:secret@h:1/0") == "redis://:***@h:1/0"
    assert public_url("rediss://me:s%40t@h:1/0?x=1") == "rediss://me:***@h:1/0?x=1"
    assert public_url("unix:///tmp/a.sock") == "unix:///tmp/a.sock"
    assert public_url("redis://h:1") == "redis://h:1"


async def test_with_a_host_it_listens_on_tcp_and_wants_its_password(short_dir: Path) -> None:
    tcp = LogServer(short_dir, host="127.0.0.1")
    try:
        await tcp.start()
        log = await tcp.open("run-1")
        assert await log.claim("w") == 1
        address = tcp.url.partition("@")[2]
        for wrong in (f"redis://{address}", f"redis://:nonsense@{address}"):
            with pytest.raises(LogError, match="refuses this user") as caught:
                await connect(wrong, "run-1", connect_timeout_s=2.0)
            assert not isinstance(caught.value, LogUnavailable)
            assert "nonsense" not in str(caught.value)
    finally:
        await tcp.close_logs()
        tcp.kill()


async def test_an_acl_user_can_be_given_in_the_url(short_dir: Path) -> None:
    tcp = LogServer(short_dir, host="127.0.0.1")
    try:
        await tcp.start()
        admin = await tcp.open("run-1")
        await admin.call("ACL", "SETUSER", "segue", "on", ">pw", "~{run-1}:*", "+@all", "-@dangerous", "+info")
        log = await tcp.open("run-1", url=f"redis://segue:pw@{tcp.url.partition('@')[2]}")
        pen = Pen("run-1", "w", await log.claim("w"))
        assert await log.append([pen.prepare(targets=("t",))]) == [Appended(1, False)]
        assert len(await log.receive("t", "c")) == 1
    finally:
        await tcp.close_logs()
        tcp.kill()


def test_secrets_stand_in_a_private_file_and_not_in_the_command_line(short_dir: Path) -> None:
    command = server.server_command(short_dir, host="127.0.0.1", password="hush hush")
    conf = short_dir / "log" / "server.conf"
    assert stat.S_IMODE(conf.stat().st_mode) == 0o600
    assert "hush" not in " ".join(command.argv)
    assert command.url.startswith("redis://:hush%20hush@127.0.0.1:")


def test_a_path_too_long_for_a_unix_socket_falls_to_loopback_tcp(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / "run-1"
    deep.mkdir(parents=True)
    command = server.server_command(deep)
    assert command.url.startswith("redis://:")
    assert "@127.0.0.1:" in command.url


async def test_a_long_and_odd_path_works(tmp_path: Path) -> None:
    deep = tmp_path / ('d "q" \\ ' * 12) / "run-1"
    deep.mkdir(parents=True)
    odd = LogServer(deep)
    try:
        await odd.start()
        log = await odd.open("run-1")
        assert await log.tail() == 0
    finally:
        await odd.close_logs()
        odd.kill()


# left-overs, damage, a full disk


async def test_a_leftover_server_of_the_run_is_ended_and_its_data_is_there_on_the_next_start(
    own_server: LogServer,
) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare()])
    assert server.is_running(own_server.run_dir)
    assert await asyncio.to_thread(server.end_leftover, own_server.run_dir)
    assert not server.is_running(own_server.run_dir)
    assert not server.end_leftover(own_server.run_dir)
    own_server.kill()
    await own_server.start()
    log = await own_server.open("run-1")
    assert await log.tail() == 1


async def test_a_leftover_that_hangs_is_killed(own_server: LogServer) -> None:
    await own_server.start()
    os.kill(own_server.pid, signal.SIGSTOP)
    assert await asyncio.to_thread(lambda: server.end_leftover(own_server.run_dir, deadline_s=0.5))


def test_another_process_with_the_recorded_pid_is_left_alone(short_dir: Path) -> None:
    server.server_command(short_dir)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        (short_dir / "log" / "server.pid").write_text(f"{bystander.pid}\n")
        assert not server.end_leftover(short_dir)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_torn_end_of_the_append_only_file_loses_whole_events_only(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    batch = [pen.prepare(targets=("t",)) for _ in range(10)]
    for item in batch:
        await log.append([item])
    own_server.kill()
    [file] = (own_server.run_dir / "log" / "aof").glob("*.incr.aof")
    os.truncate(file, file.stat().st_size - 37)
    await own_server.start()
    log = await own_server.open("run-1")
    assert await log.tail() == 9
    assert [e.position for e in await log.read(0)] == list(range(1, 10))
    assert len(await log.receive("t", "c")) == 9
    with pytest.raises(LogCorruptError, match="went back"):
        await log.read(10)
    assert await log.append(batch[8:]) == [Appended(9, True), Appended(10, False)]


async def test_a_damaged_append_only_file_is_reported_with_its_remedy(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare() for _ in range(20)])
    own_server.kill()
    [file] = (own_server.run_dir / "log" / "aof").glob("*.incr.aof")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = b"\x00" * 200
    file.write_bytes(data)
    own_server.spawn()
    with pytest.raises(LogCorruptError, match="append-only file is damaged.*valkey-check-aof --fix"):
        await own_server.ready()


async def test_a_server_that_dies_at_its_start_is_noticed_at_once_with_its_last_words(own_server: LogServer) -> None:
    shutil.rmtree(own_server.run_dir / "log")
    own_server.command = server.server_command(own_server.run_dir)
    (own_server.run_dir / "log" / "aof").write_text("a file where a folder belongs")
    own_server.spawn()
    async with asyncio.timeout(5.0):
        with pytest.raises(LogUnavailable, match=r"died; its last words, in .*log-server.log: .*aof"):
            await own_server.ready()


async def test_a_full_disk_is_said_and_nothing_half_written_stays(short_dir: Path) -> None:
    full = LogServer(short_dir)
    try:
        await full.start()
        log = await full.open("run-1")
        pen = Pen("run-1", "w", await log.claim("w"))
        resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
        acknowledged, refused = 0, None
        for _ in range(2000):
            try:
                await log.append([pen.prepare() for _ in range(5)])
                acknowledged += 5
            except LogUnavailable as error:
                refused = error
                break
        assert refused is not None
        assert "cannot write its append-only file (disk full or failing?)" in str(refused)
        full.kill()
        await full.start()
        log = await full.open("run-1")
        events = await log.read(0, limit=10_000)
        assert [e.position for e in events] == list(range(1, await log.tail() + 1))
        assert 0 < len(events) <= acknowledged
    finally:
        await full.close_logs()
        full.kill()


async def test_a_server_out_of_memory_refuses_the_append_whole_and_says_so(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    pen = Pen("run-1", "w", await log.claim("w"))
    await log.append([pen.prepare()])
    await log.call("CONFIG", "SET", "maxmemory", "1mb")
    batch = [pen.prepare() for _ in range(3)]
    with pytest.raises(LogUnavailable, match="out of memory"):
        await log.append(batch)
    assert await log.tail() == 1
    await log.call("CONFIG", "SET", "maxmemory", "0")
    assert await log.append(batch) == [Appended(p, False) for p in (2, 3, 4)]


async def test_a_server_that_would_evict_the_log_is_refused(own_server: LogServer) -> None:
    await own_server.start()
    log = await own_server.open("run-1")
    await log.call("CONFIG", "SET", "maxmemory", "100mb")
    await log.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(LogError, match="noeviction"):
        await own_server.open("run-1")


def test_a_server_that_is_too_old_is_refused() -> None:
    with pytest.raises(LogError, match=r"Redis 6.2.14; .* >= 7.0"):
        redis._check_server({"redis_version": "6.2.14"}, "redis://h")
    redis._check_server({"redis_version": "7.0.15", "aof_enabled": "1"}, "redis://h")
