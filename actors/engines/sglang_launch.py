"""Starts SGLang's HTTP server: `python -m actors.engines.sglang_launch --model-path ... --port ...`.

SGLang starts its scheduler and detokenizer with multiprocessing "spawn", which imports this very module again in each
child before anything of SGLang. So what stands at module level here holds in every process of the engine: the CPU
stand-ins, and the wish to die with the parent.

Invariant: whichever process of the tree dies, by whatever signal, the ones below it are killed by the kernel.
"""

from __future__ import annotations

import sys

from actors.engines.lifeline import die_with_parent
from actors.engines.sglang_cpu import early

die_with_parent()
early()


def main() -> None:
    """Run the server until it ends, then end whatever it started."""
    import os

    from sglang.launch_server import run_server  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found,unused-ignore]

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
