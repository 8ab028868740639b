"""What an engine is started with, and the command that comes of it: plain data shared by all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine process; None leaves the choice to the engine.

    max_total_tokens: tokens of KV cache; on a CPU the engine's own choice is most of the machine's memory, so
    None means `sglang.CPU_KV_TOKENS` there. memory_saver: weights, KV cache and graphs can be given back (GPU only).
    weight_version: number of the weights in model_path. extra_args: passed on as they are, last, so they win. env:
    laid over the environment that the kind itself sets (PYTHONPATH, say, for an engine with a site of its own).
    """

    model_path: Path
    port: int
    log_file: Path
    host: str = "127.0.0.1"
    device: Device = "auto"
    dtype: str = "auto"
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    return_routed_experts: bool = False
    memory_saver: bool = False
    mem_fraction_static: float | None = None
    context_length: int | None = None
    tp_size: int = 1
    random_seed: int | None = None
    weight_version: int = 0
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Address at which the engine will answer."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A command to run: `env` is laid over the owner's environment; output goes to the end of `log_file`."""

    argv: tuple[str, ...]
    url: str
    log_file: Path
    env: dict[str, str] = field(default_factory=dict)
