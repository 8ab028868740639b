"""An engine without a model: SGLang's HTTP surface over a deterministic function, for tests and dry runs.

It starts in well under a second, needs neither torch nor a GPU, keeps the real engine's rules about pausing, aborting,
caching and weight sessions, and answers 400 where the real one would die. `python -m actors.engines.fake --port ...`
starts it as a process; `FakeEngine` (in `actors.engines.fake.server`) runs it inside a test's event loop.
"""

from __future__ import annotations

import sys

from actors.engines.options import EngineOptions, LaunchSpec

__all__ = ["launch_spec"]


def launch_spec(options: EngineOptions) -> LaunchSpec:
    """The command that starts the fake; its own options (--token-s, --vocab-size ...) go into `extra_args`."""
    args = {
        "--model-path": options.model_path,
        "--host": options.host,
        "--port": options.port,
        "--weight-version": options.weight_version,
        "--max-total-tokens": options.max_total_tokens,
        "--max-running-requests": options.max_running_requests,
        "--context-length": options.context_length,
        "--seed": options.random_seed,
    }
    argv = [sys.executable, "-m", "actors.engines.fake"]
    argv += [str(part) for item in args.items() if item[1] is not None for part in item]
    if options.return_routed_experts:
        argv.append("--enable-return-routed-experts")
    return LaunchSpec((*argv, *options.extra_args), options.url, options.log_file)
