"""`segue log`: print the events of a run, one line or one JSON document each."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path

import msgspec

from segue.events import Recorded
from segue.log.reader import open_reader

BODY_WIDTH = 160


def log(argv: list[str]) -> int:
    """Exit code 0; 1 if there is no such run or its log is damaged."""
    parser = argparse.ArgumentParser(prog="segue log", description="The events of a run in their one order.")
    parser.add_argument("run", type=Path, help="folder of the run, e.g. runs/first-words-...")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="start after position N")
    parser.add_argument("--type", default="", metavar="PREFIX", help="only types with this prefix, e.g. turn.")
    parser.add_argument("--json", action="store_true", help="whole events as JSON lines")
    parser.add_argument("--follow", action="store_true", help="stay and print what is appended")
    options = parser.parse_args(argv)
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_print(options))
    return 0


async def _print(options: argparse.Namespace) -> None:
    reader = await open_reader(options.run)
    position = options.after
    try:
        while True:
            batch = await reader.read(position, limit=1024, wait_s=1.0 if options.follow else 0.0)
            for event in batch:
                position = event.position
                if event.envelope.type.startswith(options.type):
                    sys.stdout.write(_line(event, whole=options.json))
            sys.stdout.flush()
            if not batch and not options.follow:
                return
    finally:
        await reader.close()


def _line(event: Recorded, *, whole: bool) -> str:
    if whole:
        document = {"position": event.position, "event": event.envelope}
        return msgspec.json.encode(document).decode() + "\n"
    body = bytes(event.envelope.body).decode()
    shown = body if len(body) <= BODY_WIDTH else body[:BODY_WIDTH] + "…"
    clock = time.strftime("%H:%M:%S", time.localtime(event.envelope.wall_s))
    return f"{event.position:>8}  {clock}  {event.id.producer:<12} {event.envelope.type:<24} {shown}\n"
