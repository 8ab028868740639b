"""Does a turn become dearer the longer its session is, and does memory grow with more than its tokens?

A request carries the whole history, so it grows for everybody: the limit is the bare proxy's own growth on the same
bodies. Conversations of 200 turns, 64 + 64 tokens, played one after another; growth is the median latency of turns 95
to 105 over that of turns 2 to 6. Then many conversations side by side: resident memory by tokens held.

    python benchmarks/session_growth.py [--sessions 7] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from pathlib import Path

from rig import contestants, report
from rig.contestants import Contestant, SegueServer
from rig.load import Conversations, drive

TURNS, TOKENS, EARLY, LATE = 200, 64, slice(1, 6), slice(94, 105)
MEMORY_STEPS = (25, 50, 75, 100)


async def latencies(one: Contestant, talk: Conversations) -> list[float]:
    """Seconds of each turn of one conversation."""
    opened = await one.open(1)
    outcome = await drive(one.url, [talk.play(one.url, iter(opened))])
    await one.close(opened)
    return outcome.latencies_s


def growth(turns: list[float]) -> float:
    return statistics.median(turns[LATE]) / statistics.median(turns[EARLY])


async def memory(ours: SegueServer, talk: Conversations, sessions: int) -> list[dict[str, object]]:
    """Resident bytes after so many turns of `sessions` conversations side by side."""
    opened = await ours.open(sessions)
    playing = [talk.play(ours.url, iter([place])) for place in opened]
    before, done, rows = report.resident_bytes(ours.pid), 0, list[dict[str, object]]()
    for turns in MEMORY_STEPS:
        await drive(ours.url, [itertools.islice(stream, turns - done) for stream in playing])
        done, tokens = turns, sessions * turns * 2 * TOKENS
        grown = report.resident_bytes(ours.pid) - before
        each = round(grown / tokens, 1)
        rows.append({"turns": turns, "tokens_held": tokens, "grown_mb": round(grown / 1e6, 1), "bytes_a_token": each})
    await ours.close(opened)
    return rows


async def measure(folder: Path, sessions: int, side_by_side: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    model = contestants.write_model(folder / "model")
    talk = Conversations(model, TURNS, TOKENS)
    with contestants.engine(model) as url:
        async with contestants.bare(url) as bare, contestants.segue_server(url, model, folder) as ours:
            bare_turns, our_turns = list[list[float]](), list[list[float]]()
            for number in range(sessions + 1):  # the first one warms up
                for one, found in ((bare, bare_turns), (ours, our_turns)):
                    turns = await latencies(one, talk)
                    if number:
                        found.append(turns)
            rows: list[dict[str, object]] = [
                {
                    "server": name, "turn_2_ms": _ms(found, EARLY), "turn_100_ms": _ms(found, LATE),
                    "turn_200_ms": _ms(found, slice(189, 200)),
                }
                for name, found in (("bare aiohttp + orjson proxy", bare_turns), ("segue session server", our_turns))
            ]  # fmt: skip
            held = await memory(ours, talk, side_by_side)
    report.table("a conversation of 200 turns", rows)
    report.table(f"memory of {side_by_side} conversations side by side", held)
    first, last = held[0], held[-1]
    ratios = {
        "growth_over_bare_growth": report.median_ratio(map(growth, our_turns), map(growth, bare_turns)),
        "bytes_a_token_late_over_early": round(
            float(str(last["bytes_a_token"])) / float(str(first["bytes_a_token"])), 3
        ),
    }
    return [*rows, *held], ratios


def _ms(found: list[list[float]], part: slice) -> float:
    return round(1000 * statistics.median(value for turns in found for value in turns[part]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few short conversations; prints only")
    options = parser.parse_args()
    sessions, side_by_side = (2, 8) if options.quick else (options.sessions, 32)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        rows, ratios = asyncio.run(measure(Path(folder), sessions, side_by_side))
    report.write("session_growth", rows, ratios, {"sessions": sessions, "tokens": TOKENS}, quick=options.quick)


if __name__ == "__main__":
    main()
