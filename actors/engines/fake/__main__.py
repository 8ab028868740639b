"""`python -m actors.engines.fake --port ... --model-path ...`: a fake engine as a process."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from actors.engines.fake.model import model_of
from actors.engines.fake.server import FakeEngine, FakeOptions

SIZES = ("vocab_size", "layers", "top_k", "experts", "eos_id", "eos_p", "seed")


def main() -> None:
    """Serve until killed."""
    args = _arguments()
    sizes = {name: getattr(args, name) for name in SIZES}
    options = FakeOptions(
        model_path=args.model_path,
        model=model_of(args.model_path, **sizes),
        host=args.host,
        port=args.port,
        version=args.weight_version,
        token_s=args.token_s,
        return_routed_experts=args.enable_return_routed_experts,
        context_length=args.context_length,
        max_running_requests=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        vary_by_rid=args.vary_by_rid,
    )
    asyncio.run(_serve(options))


async def _serve(options: FakeOptions) -> None:
    async with FakeEngine(options) as engine:
        print(f"fake engine at {engine.url}", flush=True)
        await asyncio.Event().wait()  # until a signal ends the process


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--weight-version", type=int, default=0)
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds that one token takes")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--max-total-tokens", type=int, default=65536)
    parser.add_argument("--vary-by-rid", action="store_true", help="answer one prompt differently at temperature > 0")
    for size in ("vocab-size", "layers", "top-k", "experts", "eos-id", "seed"):
        parser.add_argument(f"--{size}", type=int, help="default: from the model's config.json")
    parser.add_argument("--eos-p", type=float, help="chance of ending at each token")
    return parser.parse_args()


if __name__ == "__main__":
    main()
