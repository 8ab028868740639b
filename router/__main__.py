"""`python -m router --run-dir runs/<id>`: the router process of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from segue.boot import run_service


def entry() -> int:
    parser = argparse.ArgumentParser(prog="python -m router", description="Assign sessions to engines.")
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    from router.service import main  # aiohttp and the rest only once the arguments are known to be right

    return run_service("router", arguments.run_dir, main)


if __name__ == "__main__":
    sys.exit(entry())
