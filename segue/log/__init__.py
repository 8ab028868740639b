"""The event log: the one order of everything that happens in a run, and the pens and readers that use it.

It never decides, and it never looks into an event's body.
"""

from __future__ import annotations

from segue.boot import RunContext
from segue.log import redis
from segue.log.file import FileLog
from segue.log.follow import follow
from segue.log.memory import MemoryLog
from segue.log.protocol import Appended, Delivery, EventLog, Prepared
from segue.log.reader import RunReader, open_reader, segment_dir
from segue.log.redis import RedisLog
from segue.log.sealing import Readable, export_jsonl, seal, trim
from segue.log.writer import Writer, Written

__all__ = [
    "Appended", "Delivery", "EventLog", "FileLog", "MemoryLog", "Prepared", "Readable", "RedisLog", "RunReader",
    "Writer", "Written", "connect", "export_jsonl", "follow", "open_log", "open_reader", "seal", "segment_dir", "trim",
]  # fmt: skip


async def connect(url: str, run: str, *, connect_timeout_s: float = 10.0) -> EventLog:
    """The log of `run` on the server at `url`; see segue.log.redis.connect for URL forms and errors."""
    return await redis.connect(url, run, connect_timeout_s=connect_timeout_s)


async def open_log(ctx: RunContext) -> EventLog:
    """The log that this process's run uses."""
    return await connect(ctx.endpoints.log_url, ctx.run_id, connect_timeout_s=ctx.config.log.connect_timeout_s)
