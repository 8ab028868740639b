"""How fast is the event log, and what do its promises cost over the bare server?

Every row of the log has its rival in the same run, on the same server and with the same bytes: redis-py's own pipeline
of XADD, its single XADD, XRANGE, XREADGROUP with XACK. Rounds of both sides alternate, so that other load on the
machine meets both; a rate is that of the median round, a ratio the median of the rounds' ratios.

    python benchmarks/event_log.py [--events 20000] [--rounds 5] [--fsync everysec|always]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from segue.events import codec
from segue.events.base import Body, Bulk
from segue.events.run import AlarmRaised
from segue.events.turn import TurnCommitted, TurnStarted
from segue.ids import EventId, fresh_id
from segue.log import RedisLog, Writer, redis
from segue.log.protocol import Prepared
from segue.state.run import RunState
from segue.testing.events import prepare
from segue.testing.log_fixtures import LogServer

BATCH = 100
EVENT_BYTES = 450
SINGLES = 2000

Round = Callable[[], Awaitable[int]]
"""One round of work; returns how many events it moved."""


@dataclass(frozen=True, slots=True)
class Bench:
    server: LogServer
    client: Redis
    events: int

    async def fresh(self) -> tuple[RedisLog, str]:
        """A new empty log, and the name of an equally new raw stream."""
        run = fresh_id("run")
        return await redis.connect(self.server.url, run), f"{{{run}}}:raw"


def alarms(run: str, count: int) -> list[Prepared]:
    """`count` events of one producer without logical keys, EVENT_BYTES each."""
    padding = "x" * (EVENT_BYTES - 165)
    body = AlarmRaised(kind="benchmark", subject="event log", detail=padding)
    return [prepare(EventId(run, "bench", 1, seq), body, wall_s=1.7e9) for seq in range(1, count + 1)]


def turns(run: str, count: int) -> list[Prepared]:
    """What a run's log mostly holds: turns started and committed, with their logical keys."""
    bulk = Bulk(digest="0" * 64, size=30_000)
    made: list[Prepared] = []
    for number in range(count):
        session, turn, request = f"session-{number // 8:024x}", f"turn-{number // 2:024x}", f"req-{number // 2:024x}"
        body: Body = TurnStarted(
            session_id=session, turn_id=turn, request_id=request, engine_id="engine-0", prompt_tokens=512
        )
        if number % 2:
            body = TurnCommitted(
                session_id=session, turn_id=turn, parent_id="", request_id=request, request_digest="0" * 64,
                messages=bulk, tokens=bulk, spans=((0, 64, 3),), finish_reason="stop", prompt_tokens=32,
                output_tokens=64, parts=1, token_digest="0" * 64, logprob_digest="0" * 64,
            )  # fmt: skip
        made.append(prepare(EventId(run, "session-0", 1, number + 1), body, wall_s=1.7e9))
    return made


async def raw_pipeline(b: Bench) -> int:
    log, stream = await b.fresh()
    items = [p.data for p in alarms(log.run, b.events)]

    async def go() -> int:
        for start in range(0, len(items), BATCH):
            pipeline = b.client.pipeline(transaction=False)
            for data in items[start : start + BATCH]:
                pipeline.xadd(stream, {"e": data})
            await pipeline.execute()
        return len(items)

    return await timed(go, log)


async def our_append(b: Bench) -> int:
    log, _ = await b.fresh()
    await log.claim("bench")
    items = alarms(log.run, b.events)

    async def go() -> int:
        for start in range(0, len(items), BATCH):
            await log.append(items[start : start + BATCH])
        return len(items)

    return await timed(go, log)


async def our_keyed_append(b: Bench) -> int:
    log, _ = await b.fresh()
    await log.claim("session-0")
    items = turns(log.run, b.events)

    async def go() -> int:
        for start in range(0, len(items), BATCH):
            await log.append(items[start : start + BATCH])
        return len(items)

    return await timed(go, log)


async def our_writer(b: Bench) -> int:
    log, _ = await b.fresh()
    body = AlarmRaised(kind="benchmark", subject="event log", detail="x" * (EVENT_BYTES - 165))

    async def go() -> int:
        async with await Writer.open(log, "bench") as writer:
            for _ in range(0, b.events, BATCH):
                await asyncio.gather(*[writer.submit(body) for _ in range(BATCH)])
        return b.events

    return await timed(go, log)


async def raw_single(b: Bench) -> int:
    log, stream = await b.fresh()
    items = [p.data for p in alarms(log.run, SINGLES)]

    async def go() -> int:
        for data in items:
            await b.client.xadd(stream, {"e": data})
        return len(items)

    return await timed(go, log)


async def our_single(b: Bench) -> int:
    log, _ = await b.fresh()
    await log.claim("bench")
    items = alarms(log.run, SINGLES)

    async def go() -> int:
        for item in items:
            await log.append([item])
        return len(items)

    return await timed(go, log)


async def raw_read(b: Bench) -> int:
    log, stream = await b.fresh()
    pipeline = b.client.pipeline(transaction=False)
    for item in alarms(log.run, b.events):
        pipeline.xadd(stream, {"e": item.data})
    ids = await pipeline.execute()

    async def go() -> int:
        last, got = "-", 0
        while got < len(ids):
            entries = await b.client.xrange(stream, last, "+", count=512)
            got, last = got + len(entries), f"({entries[-1][0].decode()}"
        return got

    return await timed(go, log)


async def our_read(b: Bench) -> int:
    log, _ = await b.fresh()
    await log.claim("bench")
    await log.append(alarms(log.run, b.events))

    async def go() -> int:
        after = 0
        while events := await log.read(after):
            after = events[-1].position
        return after

    return await timed(go, log)


async def raw_consume(b: Bench) -> int:
    log, stream = await b.fresh()
    pipeline = b.client.pipeline(transaction=False)
    for item in alarms(log.run, b.events):
        pipeline.xadd(stream, {"e": item.data})
    await pipeline.execute()
    await b.client.xgroup_create(stream, "g", "0")

    async def go() -> int:
        got = 0
        while reply := await b.client.xreadgroup("g", "c", {stream: ">"}, count=BATCH):
            ids = [entry[0] for entry in reply[0][1]]
            await b.client.xack(stream, "g", *ids)
            got += len(ids)
        return got

    return await timed(go, log)


async def our_consume(b: Bench) -> int:
    log, _ = await b.fresh()
    await log.claim("bench")
    await log.append([Prepared(p.producer, 1, p.seq, p.data, targets=("t",)) for p in alarms(log.run, b.events)])

    async def go() -> int:
        got = 0
        while deliveries := await log.receive("t", "c", limit=BATCH):
            await log.acknowledge("t", [d.event.position for d in deliveries])
            got += len(deliveries)
        return got

    return await timed(go, log)


async def timed(go: Round, log: RedisLog) -> int:
    """Events per second of `go`, whose preparations are not counted."""
    started = time.perf_counter()
    moved = await go()
    took = time.perf_counter() - started
    await log.call("DEL", f"{{{log.run}}}:raw", f"{{{log.run}}}:log", f"{{{log.run}}}:to:t", f"{{{log.run}}}:keys")
    await log.close()
    return round(moved / took)


async def decode_only(b: Bench) -> int:
    items = turns("run", b.events)
    started = time.perf_counter()
    for position, item in enumerate(items, 1):
        codec.decode(position, item.data)
    return round(len(items) / (time.perf_counter() - started))


async def decode_and_fold(b: Bench) -> int:
    items = turns("run", b.events)
    state = RunState()
    started = time.perf_counter()
    for position, item in enumerate(items, 1):
        state.apply(codec.decode(position, item.data))
    return round(len(items) / (time.perf_counter() - started))


ROWS: dict[str, Callable[[Bench], Awaitable[int]]] = {
    "redis-py pipeline of 100 XADD": raw_pipeline,
    "append, batches of 100": our_append,
    "append with logical keys, batches of 100": our_keyed_append,
    "Writer, 100 at once (encoding included)": our_writer,
    "redis-py XADD one by one": raw_single,
    "append one by one": our_single,
    "redis-py XRANGE 512": raw_read,
    "read 512 (decoding included)": our_read,
    "redis-py XREADGROUP 100 + XACK": raw_consume,
    "receive 100 + acknowledge (decoding included)": our_consume,
    "decode": decode_only,
    "decode and fold into RunState": decode_and_fold,
}
RATIOS = {
    "append_over_raw_pipeline": ("append, batches of 100", "redis-py pipeline of 100 XADD"),
    "append_over_raw_single": ("append one by one", "redis-py XADD one by one"),
    "read_over_raw": ("read 512 (decoding included)", "redis-py XRANGE 512"),
    "consume_over_raw": ("receive 100 + acknowledge (decoding included)", "redis-py XREADGROUP 100 + XACK"),
    "fold_over_decode": ("decode and fold into RunState", "decode"),
}


async def measure(run_dir: Path, events: int, rounds: int, fsync: str) -> dict[str, list[int]]:
    server = LogServer(run_dir, fsync="always" if fsync == "always" else "everysec")
    await server.start()
    client = Redis.from_url(server.url)
    bench = Bench(server, client, events)
    rates: dict[str, list[int]] = {name: [] for name in ROWS}
    try:
        for _ in range(rounds):
            for name, row in ROWS.items():
                rates[name].append(await row(bench))
    finally:
        await client.aclose()
        server.kill()
    return rates


def median_ratio(ours: list[int], rival: list[int]) -> float:
    """Median of the rounds' ratios: the two sides of a round ran one after the other, under the same other load."""
    return round(statistics.median(a / b for a, b in zip(ours, rival, strict=True)), 3)


def machine() -> dict[str, str | int]:
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "cpu": model, "cores": os.cpu_count() or 0, "python": platform.python_version(), "system": platform.platform(),
    }  # fmt: skip


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fsync", choices=("everysec", "always"), default="everysec")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "event_log.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        rates = asyncio.run(measure(Path(folder), options.events, options.rounds, options.fsync))
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    ratios = {name: median_ratio(rates[ours], rates[rival]) for name, (ours, rival) in RATIOS.items()}
    for name, median in medians.items():
        print(f"{name:<48} {median:>9,} events/s   ({min(rates[name]):,} to {max(rates[name]):,})")
    print()
    for name, ratio in ratios.items():
        print(f"{name:<48} {ratio:>9.2f}")
    result = {
        "machine": machine(),
        "settings": {"events": options.events, "rounds": options.rounds, "fsync": options.fsync, "bytes": EVENT_BYTES},
        "rows": [{"name": name, "events_per_s": medians[name], "rounds": rates[name]} for name in ROWS],
        "ratios": ratios,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
