"""What of an owner is on its device, and the bytes that are reported before and after each move.

An accelerator's owner measures; the fakes and the CPU have nothing to measure, so what they report are the sizes that
the run's configuration predicts (zero if it names none).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

GIB = 1024**3


class Held(NamedTuple):
    device_bytes: int
    host_bytes: int


@dataclass(slots=True)
class Residency:
    """`tags`: all that the owner has. `host_copy`: tag whose release leaves `host_bytes` behind on the host."""

    tags: tuple[str, ...]
    sizes_gib: Mapping[str, float]
    host_copy: str
    host_size: str
    released: set[str] = field(default_factory=set)

    def held(self) -> Held:
        device = sum(int(self.sizes_gib.get(tag, 0.0) * GIB) for tag in self.tags if tag not in self.released)
        host = int(self.sizes_gib.get(self.host_size, 0.0) * GIB) if self.host_copy in self.released else 0
        return Held(device, host)

    def resident(self, tags: Iterable[str]) -> tuple[str, ...]:
        """Those of `tags` that are on the device."""
        return tuple(tag for tag in tags if tag not in self.released)


def engine_residency(sizes_gib: Mapping[str, float]) -> Residency:
    return Residency(("weights", "kv_cache", "cuda_graph"), sizes_gib, "weights", "mirror")


def trainer_residency(sizes_gib: Mapping[str, float]) -> Residency:
    return Residency(("params", "grads", "optimizer", "default"), sizes_gib, "optimizer", "backup")
