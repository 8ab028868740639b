"""`python -m session_server --run-dir D --index I`: one session server of a run."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from segue.boot import RunContext, run_service


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="session_server", description="One session server of a run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--index", type=int, required=True, help="number of this server, from 0")
    arguments = parser.parse_args(argv)
    # A server's memory is conversations, which have no cycles: collecting as often as Python does by default walks
    # through all of them again and again (a seventh of a turn's time with a thousand turns in memory).
    gc.set_threshold(50_000, 20, 100)
    from session_server.app import serve
    from session_server.server import service_name

    async def run(ctx: RunContext) -> None:
        await serve(ctx, arguments.index)

    return run_service(service_name(arguments.index), arguments.run_dir, run)


if __name__ == "__main__":
    sys.exit(main())
