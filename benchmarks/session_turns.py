"""What does a turn cost in each server that could stand between an agent and the engine?

(a) a bare proxy, (b) sglang-router, (c) a session proxy as they are commonly written, (d) ours, which keeps every
token and appends each turn to a real log server before it answers. The engine answers at once with canned bytes.

One turn: 256 new tokens with log-probs, short prompt, at several concurrencies; `added` is the median latency beyond
that of the engine asked directly. Sessions: 20 turns of 64 + 64 tokens, each request with the whole history; ours opens
its sessions within the measured time. The contestants take turns within a round; a ratio is the median of the rounds'.

    python benchmarks/session_turns.py [--rounds 5] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rig import contestants, report
from rig.contestants import Contestant
from rig.engine import prose
from rig.load import Conversations, Outcome, chat_body, drive, request

CONCURRENCIES = (1, 8, 32, 128)
TURNS, SESSION_TURNS, SESSION_TOKENS, NEW_TOKENS = {1: 200, 8: 400, 32: 800, 128: 800}, 20, 64, 256
SLOW = 0.25
"""Share of the requests that the slowest contestant plays: a rate needs no more."""
USER = {number: f"{prose(24, seed=number)} {number}" for number in range(1000)}


@dataclass(slots=True)
class Measured:
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    p50_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    p99_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, outcome: Outcome) -> None:
        self.rates[name].append(outcome.rate)
        self.p50_ms[name].append(outcome.p50_ms)
        self.p99_ms[name].append(outcome.percentile_ms(0.99))


async def single_turns(one: Contestant, concurrency: int, turns: int, path: str = "") -> Outcome:
    """`turns` first turns over `concurrency` connections, a session for each connection, every message another."""
    opened = await one.open(concurrency)
    numbers = itertools.count()

    def stream(place: tuple[str, str]) -> Iterator[bytes]:
        for _ in range(max(1, turns // concurrency)):
            messages = [{"role": "user", "content": USER[next(numbers) % len(USER)]}]
            yield request(one.url, path or place[0], chat_body(messages, NEW_TOKENS), token=place[1])

    await drive(one.url, [itertools.islice(stream(place), 1) for place in opened])  # connections and assignments
    outcome = await drive(one.url, [iter(list(stream(place))) for place in opened])
    await one.close(opened)
    return outcome


def native(body: bytes) -> bytes:
    """A request for the engine's own /generate with as many tokens."""
    return b'{"rid":"r","input_ids":[1,2,3],"sampling_params":{"max_new_tokens":%d},"return_logprob":true}' % NEW_TOKENS


async def native_turns(one: Contestant, concurrency: int, turns: int) -> Outcome:
    sending = request(one.url, "/generate", native(b""))
    await drive(one.url, [iter([sending])] * concurrency)
    return await drive(one.url, [itertools.repeat(sending, turns // concurrency) for _ in range(concurrency)])


async def sessions(one: Contestant, talk: Conversations, concurrency: int, count: int) -> Outcome:
    """`count` whole conversations, `concurrency` at a time; the rate is that of turns, opening included."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    opened = await one.open(count)
    shared = iter(opened)
    outcome = await drive(one.url, [talk.play(one.url, shared) for _ in range(concurrency)])
    outcome = Outcome(outcome.latencies_s, loop.time() - begun)
    await one.close(opened)
    return outcome


async def measure(folder: Path, rounds: int, share: float) -> tuple[list[dict[str, object]], dict[str, float]]:
    model = contestants.write_model(folder / "model")
    talk = Conversations(model, SESSION_TURNS, SESSION_TOKENS)
    found = {c: Measured() for c in CONCURRENCIES}
    whole = Measured()
    async with AsyncExitStack() as stack:
        url = stack.enter_context(contestants.engine(model))
        direct = Contestant("the engine itself", url, 0)
        bare = await stack.enter_async_context(contestants.bare(url))
        router = await stack.enter_async_context(contestants.sglang_router(url))
        fastapi = await stack.enter_async_context(contestants.fastapi(url, model))
        ours = await stack.enter_async_context(contestants.segue_server(url, model, folder))
        field_ = (direct, bare, router, fastapi, ours)
        for number in range(rounds + 1):  # the first one warms up
            for concurrency in CONCURRENCIES:
                turns = int(TURNS[concurrency] * (share if number else 0.2))
                for one in field_:
                    part = max(concurrency, int(turns * (SLOW if one is fastapi else 1)))
                    outcome = await single_turns(one, concurrency, part)
                    if number:
                        found[concurrency].add(one.name, outcome)
                if number and concurrency == 32:
                    found[32].add(NATIVE, await native_turns(bare, 32, turns))
            for one in field_[1:]:
                count = max(1, int(96 * (share if number else 0.1) * (SLOW if one is fastapi else 1)))
                outcome = await sessions(one, talk, min(32, count), count)
                if number:
                    whole.add(one.name, outcome)
    return rows_of(found, whole), ratios_of(found, whole)


NATIVE = "bare proxy, the engine's native answer"
BARE, FASTAPI, OURS = "bare aiohttp + orjson proxy", "FastAPI + httpx + json proxy", "segue session server"


def rows_of(found: dict[int, Measured], whole: Measured) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for what, measured in [*((f"one turn, c={c}", m) for c, m in found.items()), ("sessions of 20 turns", whole)]:
        for name, rates in measured.rates.items():
            rows.append(
                {
                    "what": what, "server": name, "turns_per_s": round(statistics.median(rates), 1),
                    "p50_ms": round(statistics.median(measured.p50_ms[name]), 2),
                    "p99_ms": round(statistics.median(measured.p99_ms[name]), 2),
                }
            )  # fmt: skip
    return rows


def ratios_of(found: dict[int, Measured], whole: Measured) -> dict[str, float]:
    at_32, alone = found[32].rates, found[1].p50_ms
    return {
        "turn_over_bare_c32": report.median_ratio(at_32[OURS], at_32[BARE]),
        "turn_over_bare_native_c32": report.median_ratio(at_32[OURS], at_32[NATIVE]),
        "turn_over_fastapi_c32": report.median_ratio(at_32[OURS], at_32[FASTAPI]),
        "turn_over_sglang_router_c32": report.median_ratio(at_32[OURS], at_32["sglang-router (Rust)"]),
        "added_p50_ms_c1": round(
            statistics.median(a - b for a, b in zip(alone[OURS], alone["the engine itself"], strict=True)), 3
        ),
        "session20_over_bare": report.median_ratio(whole.rates[OURS], whole.rates[BARE]),
        "session20_over_fastapi": report.median_ratio(whole.rates[OURS], whole.rates[FASTAPI]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round; prints only")
    options = parser.parse_args()
    rounds, share = (1, 0.5) if options.quick else (options.rounds, 1.0)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        rows, ratios = asyncio.run(measure(Path(folder), rounds, share))
    report.table("one process each, one engine that answers at once", rows)
    report.write("session_turns", rows, ratios, {"rounds": rounds, "new_tokens": NEW_TOKENS}, quick=options.quick)


if __name__ == "__main__":
    main()
