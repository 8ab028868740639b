"""The event log on Redis Streams (Redis >= 7.0, Valkey >= 7.2), shared by all processes of a run.

Keys, all with the hash tag {run}: `log` is the stream of everything, its entry ids are `<position>-0`; `to:<target>` is
a target's stream with the same ids, read by one consumer group; `dead:<target>` its dead letters; `heads` the last
position and every producer's epoch and last seq; `seen:<name>` a producer's dedupe window; `keys` logical keys with
position and identity; `sessions` the sessions' counters.

Invariants: every change is one Lua call, hence atomic in memory and in the append-only file. Every command has a
deadline. No command is repeated behind the caller's back: a lost answer is LogUnavailable, appends are repeated by the
Writer, and a delivery whose answer was lost is found again among the consumer's pending ones. Blocking reads hold a
connection of their own from the pool, so they never delay an append.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from segue.errors import (
    ConflictError,
    FencedError,
    GapError,
    LogCorruptError,
    LogError,
    LogTrimmedError,
    LogUnavailable,
    SessionSeqError,
)
from segue.events import codec
from segue.events.codec import Recorded
from segue.log.protocol import DEDUPE_WINDOW, Appended, Delivery, Prepared

GROUP = "consumers"
COMMAND_TIMEOUT_S = 15.0
"""A server that takes longer for one command is treated as gone; an append-only file on a slow disk takes seconds."""
MAX_CALL = 4096
"""Events per Lua call: the server does nothing else meanwhile (about 10 us each)."""
_OLDEST = (7, 0)

_logger = logging.getLogger(__name__)
_SCRIPTS = {p.stem: p.read_text() for p in sorted(Path(__file__).parent.glob("*.lua"))}
_SHAS = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in _SCRIPTS.items()}
_META = msgspec.msgpack.Encoder()


def public_url(url: str) -> str:
    """The URL without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, address = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.split(':')[0]}:***@{address}"))


def translate(error: BaseException, url: str) -> LogError:
    """What a transport or server error means for the caller, in one line."""
    text = str(error) or type(error).__name__
    if isinstance(error, AuthenticationError | NoPermissionError):
        return LogError(f"{url} refuses this user: {text}; check user, password and ACL in [log] url or REDIS_URL")
    if "MISCONF" in text:
        return LogUnavailable(f"{url} cannot write its append-only file (disk full or failing?): {text}")
    if isinstance(error, OutOfMemoryError) or "OOM " in text:
        return LogUnavailable(f"{url} is out of memory (maxmemory reached); raise it or trim the log: {text}")
    if isinstance(error, TimeoutError | RedisTimeoutError | RedisConnectionError | OSError):
        return LogUnavailable(f"{url} does not answer: {text}")
    return LogError(f"{url}: {text}")


@dataclass(slots=True)
class _Cursor:
    """What one consumer of this object has been given and not acknowledged, and whether more of it may be pending."""

    recovering: bool = True
    handed: set[int] = field(default_factory=set)


class RedisLog:
    """EventLog on a Redis or Valkey server. Made by `connect`; `close()` it."""

    def __init__(self, client: Redis, url: str, run: str, *, command_timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        if not run or set(run) & set("{}"):
            raise LogError(f"run id {run!r} cannot name a log: it is empty or has braces in it")
        client.response_callbacks.clear()  # raw replies, decoded below: redis-py's shapes differ between versions
        self.run, self.url = run, public_url(url)
        self._client = client
        self._timeout_s = command_timeout_s
        self._prefix = f"{{{run}}}:"
        self._log, self._heads = self._prefix + "log", self._prefix + "heads"
        self._cursors: dict[tuple[str, str], _Cursor] = {}

    async def call(self, *command: str | bytes | int, wait_s: float = 0.0) -> Any:
        """One command, its raw reply. Raises LogUnavailable or LogError; server replies NOSCRIPT and NOGROUP pass."""
        try:
            async with asyncio.timeout(wait_s + self._timeout_s):
                return await self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            if isinstance(error, ResponseError) and str(error).startswith("NOGROUP"):
                raise
            raise translate(error, self.url) from error

    async def _script(self, name: str, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        command = (_SHAS[name], len(keys), *keys, *arguments)
        try:
            return await self.call("EVALSHA", *command)
        except NoScriptError:  # a fresh server
            await self.call("SCRIPT", "LOAD", _SCRIPTS[name])
            return await self.call("EVALSHA", *command)

    async def claim(self, producer: str) -> int:
        return int(await self._script("claim", [self._heads], producer))

    async def append(self, batch: Sequence[Prepared]) -> list[Appended | LogError]:
        answers: list[Appended | LogError] = []
        for start in range(0, len(batch), MAX_CALL):
            part = batch[start : start + MAX_CALL]
            meta = _META.encode(
                [(p.producer, p.epoch, p.seq, p.key, p.identity, p.targets, *(p.expect or ("", 0))) for p in part]
            )
            flat = await self._script("append", [self._log], DEDUPE_WINDOW, meta, *[p.data for p in part])
            answers.extend(_answer(p, flat[2 * i], flat[2 * i + 1]) for i, p in enumerate(part))
        return answers

    async def read(self, after: int, *, limit: int = 512, wait_s: float = 0.0) -> list[Recorded]:
        entries = await self.call("XRANGE", self._log, f"{after + 1}-0", "+", "COUNT", limit)
        if not entries:
            tail = await self.tail()
            if after > tail:
                raise LogCorruptError(f"read after {after}, but the log at {self.url} ends at {tail}: it went back")
            if after == tail and wait_s > 0:
                milliseconds = max(1, int(wait_s * 1000))
                reply = await self.call(
                    "XREAD", "COUNT", limit, "BLOCK", milliseconds, "STREAMS", self._log, f"{after}-0", wait_s=wait_s
                )
                entries = reply[0][1] if reply else []
            elif after < tail:  # appended since, or trimmed
                entries = await self.call("XRANGE", self._log, f"{after + 1}-0", "+", "COUNT", limit)
                if not entries:
                    raise LogTrimmedError(f"positions {after + 1} to {tail} were trimmed; read the sealed segments")
        return [_recorded(position, entry, after + 1) for position, entry in enumerate(entries, after + 1)]

    async def tail(self) -> int:
        return int(await self.call("HGET", self._heads, "tail") or 0)

    async def trim(self, below: int) -> None:
        """Forget positions < `below`. Nothing here knows what is sealed: call `segue.log.trim`, which does.

        A target's stream keeps what its group has not read or not acknowledged. That bound only ever rises, so it
        needs no lock.
        """
        await self.call("XTRIM", self._log, "MINID", f"{below}-0")
        for stream in await self._target_streams():
            groups = await self.call("XINFO", "GROUPS", stream)
            if not groups:
                continue
            group = dict(zip(groups[0][::2], groups[0][1::2], strict=True))
            pending = await self.call("XPENDING", stream, GROUP)
            lowest = _position(pending[1]) if pending[0] else below
            bound = min(below, lowest, _position(group[b"last-delivered-id"]) + 1)
            await self.call("XTRIM", stream, "MINID", f"{bound}-0")

    async def _target_streams(self) -> list[str]:
        escaped = "".join(f"[{c}]" if c in "*?[]\\" else c for c in self._prefix)
        return await self._keys(escaped + "to:*")

    async def runs(self) -> list[str]:
        """The runs whose logs are on this server."""
        return [key[1 : -len("}:log")] for key in await self._keys("{*}:log")]

    async def _keys(self, pattern: str) -> list[str]:
        cursor, found = b"0", set[bytes]()
        while True:
            cursor, keys = await self.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found.update(keys)
            if cursor == b"0":
                return sorted(key.decode() for key in found)

    def _streams(self, target: str) -> tuple[str, str]:
        return f"{self._prefix}to:{target}", f"{self._prefix}dead:{target}"

    async def _on_group(self, target: str, operation: str, *arguments: str | int, wait_s: float = 0.0) -> Any:
        """A command or script of the target's group, which is made first if it does not exist."""
        try:
            return await self._in_group(target, operation, arguments, wait_s)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        try:
            await self.call("XGROUP", "CREATE", self._streams(target)[0], GROUP, "0", "MKSTREAM")
        except LogError as error:
            if "BUSYGROUP" not in str(error):
                raise
        return await self._in_group(target, operation, arguments, wait_s)

    async def _in_group(self, target: str, operation: str, arguments: Sequence[str | int], wait_s: float) -> Any:
        streams = self._streams(target)
        if operation == "XREADGROUP":
            return await self.call("XREADGROUP", *arguments, "STREAMS", streams[0], ">", wait_s=wait_s)
        return await self._script(operation, streams, *arguments)

    async def _take(self, target: str, consumer: str, whose: str, idle_s: float, limit: int) -> list[Delivery]:
        cursor = self._cursors.setdefault((target, consumer), _Cursor())
        skip = [f"{p}-0" for p in cursor.handed] if whose == "own" else []
        taken, lost = await self._on_group(target, "take", GROUP, consumer, whose, int(idle_s * 1000), limit, *skip)
        for entry in lost:
            _logger.error("dead letter: command %s of %s was trimmed before its end", _position(entry), target)
        deliveries = [Delivery(target, codec.decode(_position(i), data), int(n)) for i, n, data in taken]
        return self._hand(cursor, deliveries)

    @staticmethod
    def _hand(cursor: _Cursor, deliveries: list[Delivery]) -> list[Delivery]:
        cursor.handed.update(d.event.position for d in deliveries)
        return deliveries

    async def receive(self, target: str, consumer: str, *, limit: int = 16, wait_s: float = 0.0) -> list[Delivery]:
        cursor = self._cursors.setdefault((target, consumer), _Cursor())
        if cursor.recovering:
            own = await self._take(target, consumer, "own", 0.0, limit)
            if own:
                return own
            cursor.recovering = False
        arguments: list[str | int] = ["GROUP", GROUP, consumer, "COUNT", limit]
        if wait_s > 0:
            arguments += ["BLOCK", max(1, int(wait_s * 1000))]
        cursor.recovering = True  # unless the answer arrives: what it carried is pending then
        reply = await self._on_group(target, "XREADGROUP", *arguments, wait_s=wait_s)
        cursor.recovering = False
        entries = reply[0][1] if reply else []
        return self._hand(cursor, [Delivery(target, codec.decode(_position(i), f[1]), 1) for i, f in entries])

    async def acknowledge(self, target: str, positions: Sequence[int]) -> None:
        if positions:
            await self.call("XACK", self._streams(target)[0], GROUP, *[f"{p}-0" for p in positions])
            self._let_go(target, positions)

    def _let_go(self, target: str, positions: Sequence[int]) -> None:
        for (of_target, _), cursor in self._cursors.items():
            if of_target == target:
                cursor.handed.difference_update(positions)

    async def touch(self, target: str, consumer: str, positions: Sequence[int]) -> None:
        if positions:
            await self._on_group(target, "touch", GROUP, consumer, *[f"{p}-0" for p in positions])

    async def reclaim(self, target: str, consumer: str, *, min_idle_s: float, limit: int = 16) -> list[Delivery]:
        try:
            return await self._take(target, consumer, "others", min_idle_s, limit)
        except (LogUnavailable, asyncio.CancelledError):
            self._cursors[target, consumer].recovering = True  # they may be ours already
            raise

    async def bury(self, target: str, position: int, reason: str) -> None:
        await self._on_group(target, "bury", GROUP, f"{position}-0", reason)
        self._let_go(target, [position])

    async def buried(self, target: str) -> list[tuple[int, str]]:
        entries = await self.call("XRANGE", self._streams(target)[1], "-", "+")
        return [(int(fields[1]), fields[3].decode()) for _, fields in entries]

    async def close(self) -> None:
        await self._client.aclose()


def _position(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _recorded(position: int, entry: Any, first: int) -> Recorded:
    found = _position(entry[0])
    if found != position:
        if position == first:
            raise LogTrimmedError(f"positions {position} to {found - 1} were trimmed; read the sealed segments")
        raise LogCorruptError(f"position {position} is missing: {found} stands there")
    return codec.decode(position, entry[1][1])


def _answer(item: Prepared, code: int, value: int) -> Appended | LogError:
    """The script's answer code (see append.lua) as the protocol's answer."""
    match code:
        case 0 | 1:
            return Appended(value, code == 1)
        case 2:
            return ConflictError(f"{item.key} stands at position {value} with another identity")
        case 3:
            session, expected = item.expect or ("", 0)
            return SessionSeqError(f"session {session} is at {value}, not {expected}")
        case 4:
            return FencedError(f"{item.producer} epoch {item.epoch} is older than {value}")
        case 5:
            return GapError(f"{item.producer} epoch {item.epoch}: seq {item.seq} follows {value}")
        case _:
            return GapError(f"{item.producer} epoch {item.epoch} was never claimed (the current one is {value})")


async def connect(url: str, run: str, *, connect_timeout_s: float = 10.0) -> RedisLog:
    """The run's log on the server at `url`: redis://, rediss:// or unix://, with user and password where it asks.

    Tries for `connect_timeout_s`, also while the server loads its file. Raises LogUnavailable if nothing answers,
    LogError if the server refuses the user, is too old, or would evict the log.
    """
    if not url:
        raise LogError("no log server: set [log] url or REDIS_URL, or let the supervisor start the embedded one")
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=None,  # `call` has the deadline; redis-py's default would cut blocking reads after 5 s
        )
    except ValueError as error:
        raise LogError(f"[log] url or REDIS_URL {public_url(url)!r}: {error}") from error
    log = RedisLog(client, url, run)
    try:
        async with asyncio.timeout(connect_timeout_s):
            info = await _first_answer(log)
        _check_server(info, log.url)
    except TimeoutError as error:
        await log.close()
        raise LogUnavailable(
            f"no log server answers at {log.url} within {connect_timeout_s:g} s; start it, or correct [log] url or "
            f"REDIS_URL (leave both empty for the embedded server)"
        ) from error
    except BaseException:
        await log.close()
        raise
    return log


async def _first_answer(log: RedisLog) -> dict[str, str]:
    """What the server says of itself, as soon as it has its data in memory (INFO is answered before that)."""
    pause_s = 0.01
    while True:
        try:
            raw = await log.call("INFO")
            info = dict(line.split(":", 1) for line in raw.decode().splitlines() if ":" in line)
            if info.get("loading", "0") == "0":
                return info
        except LogUnavailable as error:
            _logger.debug("waiting for the log server: %s", error)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.5)


def _check_server(info: dict[str, str], url: str) -> None:
    version = info.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST:
        raise LogError(f"{url} speaks Redis {version}; the event log needs Redis >= 7.0 or Valkey >= 7.2")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", "0") != "0":
        raise LogError(f"{url} evicts data when memory is full (maxmemory-policy {policy}); set it to noeviction")
    if info.get("aof_enabled") == "0":
        _logger.warning("%s keeps no append-only file: a restart of the server loses the run's log", url)
