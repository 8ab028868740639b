"""What do 10,000 open sessions cost while nobody uses them?

Resident memory of the session server after 2,500, 5,000 and 10,000 sessions, and the share of a core that session
server and router take together once all are idle. The limit is zero; beside it stands what both take without sessions.

    python benchmarks/sessions_idle.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
from rig import contestants, report
from rig.load import chat_body, drive, request

from segue.boot import Endpoints

STEPS = (2_500, 5_000, 10_000)
WATCH_S = 15.0
QUIET_S = 3.0


async def share_of_a_core(pids: list[int], seconds: float) -> float:
    await asyncio.sleep(QUIET_S)
    before = sum(map(report.cpu_s, pids))
    await asyncio.sleep(seconds)
    return (sum(map(report.cpu_s, pids)) - before) / seconds


def beside(run_dir: Path) -> tuple[Path, str]:
    """A run folder of the same run in which the router has an address of its own: the canned engine plays it else."""
    folder, url = run_dir.parent / "router" / run_dir.name, f"http://127.0.0.1:{contestants.free_port()}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((run_dir / "config.json").read_bytes())
    endpoints = msgspec.json.decode((run_dir / "endpoints.json").read_bytes(), type=Endpoints)
    moved = msgspec.structs.replace(endpoints, router_url=url)
    (folder / "endpoints.json").write_bytes(msgspec.json.encode(moved))
    return folder, url


async def measure(
    folder: Path, steps: tuple[int, ...], seconds: float
) -> tuple[list[dict[str, object]], dict[str, float]]:
    model = contestants.write_model(folder / "model")
    rows: list[dict[str, object]] = []
    with contestants.engine(model) as url:
        async with contestants.segue_server(url, model, folder) as ours:
            router_dir, router_url = beside(ours.run_dir)
            command = [sys.executable, "-m", "router", "--run-dir", str(router_dir)]
            with contestants.process(command, folder=folder) as (router, _):
                await contestants.ready(router_url)
                empty = await share_of_a_core([ours.pid, router], seconds)
                begun, done = report.resident_bytes(ours.pid), 0
                for count in steps:
                    opened = await ours.open(count - done)
                    body = chat_body([{"role": "user", "content": "a question"}], 64)
                    shared = iter([request(ours.url, path, body, token=token) for path, token in opened[::10]])
                    await drive(ours.url, [shared] * 16)
                    done, grown = count, report.resident_bytes(ours.pid) - begun
                    rows.append(
                        {"sessions": count, "grown_mb": round(grown / 1e6, 1), "bytes_a_session": round(grown / count)}
                    )
                idle = await share_of_a_core([ours.pid, router], seconds)
    rows.append({"sessions": 0, "share_of_a_core": round(empty, 4)})
    rows.append({"sessions": steps[-1], "share_of_a_core": round(idle, 4)})
    grown_mb = [float(str(row["grown_mb"])) for row in rows[: len(steps)]]
    slopes = [
        (grown_mb[n + 1] - grown_mb[n]) / (steps[n + 1] - steps[n]) for n in range(len(steps) - 1)
    ]  # what is free in the process at the start is used up by the first
    return rows, {
        "idle_share_of_a_core": round(idle, 4), "idle_share_without_sessions": round(empty, 4),
        "slope_late_over_early": round(slopes[-1] / slopes[0], 3) if slopes[0] > 0 else 0.0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sessions; prints only")
    options = parser.parse_args()
    steps, seconds = (tuple(step // 10 for step in STEPS), 3.0) if options.quick else (STEPS, WATCH_S)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        rows, ratios = asyncio.run(measure(Path(folder), steps, seconds))
    report.table("open sessions, one in ten with a turn", rows)
    report.write("sessions_idle", rows, ratios, {"watched_s": seconds}, quick=options.quick)


if __name__ == "__main__":
    main()
