"""Starts SGLang's HTTP server: `python -m actors.engines.sglang_launch --model-path ... --port ...`.

SGLang starts its scheduler and detokenizer with multiprocessing "spawn", which imports this very module again in each
child before anything of SGLang. So what stands at module level here holds in every process of the engine: the CPU
stand-ins, and the wish to die with the parent.

On a CPU the children are forked instead, as long as this process has one thread: they then share the imported code
(start-up costs a third of the CPU time and half of the wall time, and two thirds of the memory are shared). CUDA does
not survive a fork, so a GPU engine always spawns.

Invariant: whichever process of the tree dies, by whatever signal, the ones below it are killed by the kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from actors.engines.lifeline import die_with_parent
from actors.engines.sglang_cpu import cpu_requested, early

die_with_parent()
early()


def main() -> None:
    """Run the server until it ends, then end whatever it started."""
    if cpu_requested():
        _fork_where_spawn_is_asked()

    from sglang.launch_server import run_server  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found,unused-ignore]

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _fork_where_spawn_is_asked() -> None:
    """SGLang sets the start method just before its children start; that is the moment to count threads."""
    set_start_method = multiprocessing.set_start_method

    def choose(method: str | None, force: bool = False) -> None:
        if method == "spawn" and len(os.listdir("/proc/self/task")) == 1:
            method = "fork"
        print(f"engine processes start by {method}", flush=True)
        set_start_method(method, force=force)

    multiprocessing.set_start_method = choose
    os.register_at_fork(after_in_child=die_with_parent)


if __name__ == "__main__":
    main()
