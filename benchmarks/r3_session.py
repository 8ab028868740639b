"""What do recorded expert choices cost: turns a second, bytes, memory?

16 sessions of 20 turns, 128 + 128 tokens, 48 layers x 8 experts as int32 in base64 on the wire. Ours asks the engine
for the rows that it does not have; the rival is the session proxy as it is commonly written, which gets the rows of the
whole history each turn and keeps every record (a quarter of the sessions: its memory grows with the square of turns).
Then a second pass of 256 sessions: growth of resident memory over the bytes of the rows as they are stored, uint8.

    python benchmarks/r3_session.py [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import urllib.request
from pathlib import Path

from rig import contestants, report
from rig.contestants import Contestant
from rig.load import Conversations, Outcome, drive

SESSIONS, TURNS, TOKENS, LAYERS, TOP_K = 16, 20, 128, 48, 8
RAW_ROW_BYTES, COMPACT_ROW_BYTES = LAYERS * TOP_K * 4, LAYERS * TOP_K


async def play(one: Contestant, talk: Conversations, sessions: int) -> tuple[Outcome, list[tuple[str, str]]]:
    opened = await one.open(sessions)
    shared = iter(opened)
    outcome = await drive(one.url, [talk.play(one.url, shared) for _ in range(min(SESSIONS, sessions))], limit_s=400)
    return outcome, opened


async def rows_sent(engine: str) -> int:
    with await asyncio.to_thread(urllib.request.urlopen, engine + "/rows", None, 10) as answer:
        return int(answer.read())


async def measure(folder: Path, rounds: int, second_pass: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    model = contestants.write_model(folder / "model", layers=LAYERS, top_k=TOP_K)
    talk = Conversations(model, TURNS, TOKENS)
    with contestants.engine(model) as url:
        async with contestants.segue_server(url, model, folder, r3=True) as ours:
            rates, sent = list[float](), 0
            for number in range(rounds + 1):  # the first one warms up
                before = await rows_sent(url)
                outcome, opened = await play(ours, talk, SESSIONS)
                await ours.close(opened)
                sent = await rows_sent(url) - before
                if number:
                    rates.append(outcome.rate)
            warm = report.resident_bytes(ours.pid)
            before = await rows_sent(url)
            outcome, opened = await play(ours, talk, second_pass)
            grown, rows = report.resident_bytes(ours.pid) - warm, await rows_sent(url) - before
        async with contestants.fastapi(url, model, r3=True) as fastapi:
            start, before = report.resident_bytes(fastapi.pid), await rows_sent(url)
            full, _ = await play(fastapi, talk, SESSIONS // 4)
            kept, full_rows = report.resident_bytes(fastapi.pid) - start, await rows_sent(url) - before
    compact = rows * COMPACT_ROW_BYTES
    table: list[dict[str, object]] = [
        {
            "what": "segue, incremental", "sessions": SESSIONS, "turns_per_s": round(statistics.median(rates), 1),
            "raw_mb_from_engine": round(sent * RAW_ROW_BYTES / 1e6, 1),
        },
        {
            "what": "segue, second pass", "sessions": second_pass, "turns_per_s": round(outcome.rate, 1),
            "raw_mb_from_engine": round(rows * RAW_ROW_BYTES / 1e6, 1), "compact_mb": round(compact / 1e6, 1),
            "memory_grown_mb": round(grown / 1e6, 1),
        },
        {
            "what": "FastAPI + httpx + json, full", "sessions": SESSIONS // 4, "turns_per_s": round(full.rate, 1),
            "raw_mb_from_engine": round(full_rows * RAW_ROW_BYTES / 1e6, 1), "memory_grown_mb": round(kept / 1e6, 1),
        },
    ]  # fmt: skip
    # Each token's row once: so many tokens did the conversations have, less the last of each.
    ratios = {
        "incremental_turns_per_s": round(statistics.median(rates), 1),
        "growth_over_compact_bytes": round(grown / compact, 3),
        "incremental_over_fastapi_full": round(statistics.median(rates) / full.rate, 2),
        "rows_a_turn_incremental": round(sent / (SESSIONS * TURNS), 1),
        "rows_a_turn_full": round(full_rows / (SESSIONS // 4 * TURNS), 1),
    }
    return table, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, a small second pass; prints only")
    options = parser.parse_args()
    rounds, second_pass = (1, 32) if options.quick else (options.rounds, 256)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        rows, ratios = asyncio.run(measure(Path(folder), rounds, second_pass))
    report.table("sessions with route rows", rows)
    report.write("r3_session", rows, ratios, {"rounds": rounds, "second_pass": second_pass}, quick=options.quick)


if __name__ == "__main__":
    main()
