"""What SGLang needs to run where there is no GPU: one environment switch, one stand-in module, one plugin.

SGLang has a CPU path, but two optional binaries that it imports there are not published for the CPU. Nothing of
SGLang is patched; each stand-in below either does the real work in torch or raises when called.

Invariants: `early()` runs before `import sglang` in every process of the engine (the launcher sees to it);
`plugin()` is found by SGLang itself through the entry point group `sglang.srt.plugins`; importing this module costs
nothing and touches neither torch nor sglang; on a GPU both functions are no-ops.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"


def cpu_requested() -> bool:
    """True in a process whose environment selects SGLang's CPU engine."""
    return os.environ.get(CPU_SWITCH) == "1"


def early() -> None:
    """Make `import sglang` work without a GPU. Idempotent; does nothing unless the CPU engine is selected."""
    if cpu_requested() and "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _KernelStandIn()


def plugin() -> None:
    """Give the host-side buffers (recorded expert routes) plain memory: the default registers it with CUDA."""
    if not cpu_requested():
        return
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS  # type: ignore[import-not-found,unused-ignore]

    ALLOC_MEMORY_FUNCS["cpu"] = _plain_host_memory
    _sleep_while_paused()


def _sleep_while_paused() -> None:
    """Let a paused scheduler wait for its next message, as it does when idle; it would spin a core while others train.

    A paused loop only takes messages in, and the wait ends with the next one.
    """
    from sglang.srt.managers.scheduler import Scheduler  # type: ignore[import-not-found,unused-ignore]

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_wait(scheduler: Any) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_wait


def _plain_host_memory(
    dims: tuple[int, ...],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


class _KernelStandIn(types.ModuleType):
    """Takes the place of the compiled kernels: SGLang imports many names from it and calls one of them on a CPU."""

    def __init__(self) -> None:
        super().__init__("sgl_kernel", "Stand-in for the compiled kernels, which have no CPU build.")
        self.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", loader=None, is_package=True)
        self.__path__: list[str] = []
        self.assign_req_to_token_pool_cpu = _write_slots

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_args: object, **_kwargs: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} has no CPU version")

        return unavailable


def _write_slots(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int) -> None:
    """table[row, start:end] = the next (end - start) entries of `slots`, request after request (int tensors)."""
    lengths = (ends - starts).tolist()
    for row, start, part in zip(rows.tolist(), starts.tolist(), slots.split(lengths), strict=True):
        table[row, start : start + len(part)] = part.to(table.dtype)
