"""How much memory the whole run holds: the sum of resident bytes over the supervisor and everything below it."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

INTERVAL_S = 2.0


def tree_rss_bytes(root: psutil.Process | None = None) -> int:
    """Sum of resident set sizes of a process and all its descendants (shared pages count once per process)."""
    parent = root or psutil.Process()
    total = 0
    for process in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_info().rss
    return total


class MemoryWatch:
    """Samples the tree every INTERVAL_S and keeps the peak."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    async def watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(tree_rss_bytes))
            await asyncio.sleep(INTERVAL_S)
