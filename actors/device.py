"""What this machine computes on, and what follows from it. Asks the machine, not torch: drivers must not be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from segue.config import Config


def on_accelerator(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """Whether `device` means an accelerator here; "auto" takes one if there is one."""
    if device != "auto":
        return device != "cpu"
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def dtype_of(config: Config) -> Literal["float32", "bfloat16"]:
    """The dtype of engine and trainer alike."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if on_accelerator(config.engine.device) else "float32"
