"""How results are told: a table on the terminal and `benchmarks/results/<name>.json`."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

RESULTS = Path(__file__).resolve().parents[1] / "results"


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model, "cores": os.cpu_count() or 0, "python": platform.python_version(),
        "system": platform.platform(), "date": time.strftime("%Y-%m-%d %H:%M"), "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    print(f"\n{title}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        padded = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([f"{line[0]:<{widths[0]}}", *padded]))


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def median_ratio(ours: Iterable[float], rival: Iterable[float]) -> float:
    """Median of the rounds' ratios: the two sides of a round ran one after the other, under the same other load."""
    return round(statistics.median(a / b for a, b in zip(ours, rival, strict=True)), 3)


def write(
    name: str,
    rows: Sequence[Mapping[str, object]],
    ratios: Mapping[str, float],
    settings: Mapping[str, object],
    *,
    quick: bool,
) -> None:
    """Print the ratios and write the file; a quick run prints only, because its numbers are too coarse to keep."""
    print()
    for ratio, value in ratios.items():
        print(f"{ratio:<36} {value:>10.3f}")
    if quick:
        return
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine(), "settings": dict(settings), "rows": list(rows), "ratios": dict(ratios)}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
