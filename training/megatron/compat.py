"""The only importer of version-dependent megatron-core symbols, and the stand-ins that let it run without a GPU.

Invariants:
- The shim is applied exactly once, at import, and only if CUDA is not available: `plan_patches(True)` is empty.
- Every replaced name is listed by `plan_patches`, so that a test can hold the list against a new version.
- A patch whose target vanished raises at import; nothing is patched silently or half.
- Code that spells the device as a literal ("cuda") runs inside `device_literals()`, which is a no-op with CUDA. The
  hot path (forward and backward) has no such literals and stays outside, because the mode taxes every torch call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# megatron-core's jit_fuser is torch.compile: without this the first step compiles C++. Read when dynamo is imported.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

from segue.errors import TrainerError

SUPPORTED = ((0, 19), (0, 20))
"""Half-open range of megatron-core versions that this module was tested with."""


class _NullStream:
    """All streams of a CPU process are one: equal, never waiting."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, _event: object = None) -> _NullEvent:
        return _NullEvent()


class _NullEvent:
    """An event that has always happened already."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def wait(self, _stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _nothing(*_args: object, **_kwargs: object) -> None: ...


def _null_context(*_args: object, **_kwargs: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _cpu_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    torch.set_rng_state(state)


def _splits_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """all_to_all on gloo takes split sizes as numbers only; the original converts CUDA tensors alone."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@dataclass(frozen=True, slots=True)
class Patch:
    """One name that is replaced: dotted module (or class) path, attribute, stand-in."""

    owner: str
    attribute: str
    replacement: object

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.attribute}"


def plan_patches(cuda_available: bool) -> tuple[Patch, ...]:
    """The names to replace, in order; empty with CUDA."""
    if cuda_available:
        return ()
    return (
        Patch("torch.cuda", "current_device", _cpu_device),
        Patch("torch.cuda", "get_rng_state", _cpu_rng_state),
        Patch("torch.cuda", "set_rng_state", _set_cpu_rng_state),
        # torch.manual_seed seeds the CPU generator and then calls this one; it must not draw or raise.
        Patch("torch.cuda", "manual_seed", torch.default_generator.manual_seed),
        Patch("torch.cuda", "synchronize", _nothing),
        Patch("torch.cuda", "empty_cache", _nothing),
        Patch("torch.cuda", "set_device", _nothing),
        Patch("torch.cuda", "Stream", _NullStream),
        Patch("torch.cuda", "Event", _NullEvent),
        Patch("torch.cuda", "current_stream", _NullStream),
        Patch("torch.cuda", "stream", _null_context),
        Patch("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", _cpu_rng_state),
        Patch("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _set_cpu_rng_state),
        Patch("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _splits_on_cpu),
    )


def apply_patches(patches: tuple[Patch, ...]) -> tuple[str, ...]:
    """Replace every planned name; returns them. A name that is not there raises TrainerError."""
    for patch in patches:
        owner = importlib.import_module(patch.owner)
        if not hasattr(owner, patch.attribute):
            raise TrainerError(f"{patch.name} is gone from this version: the CPU stand-ins need an update")
        setattr(owner, patch.attribute, patch.replacement)
    return tuple(patch.name for patch in patches)


class _DeviceLiterals(TorchFunctionMode):
    """Maps device="cuda" to the CPU and answers Tensor.type() with the CUDA spelling that the library compares with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def device_literals() -> contextlib.AbstractContextManager[object]:
    """Context for library code that spells its device as "cuda"; free with CUDA."""
    return contextlib.nullcontext() if CUDA else _DeviceLiterals()


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """The library warns about optional packages that are absent on purpose, and about itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(Apex|apex|Transformer Engine|transformer_engine).*")
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        warnings.filterwarnings("ignore", message="Mimo.* is experimental")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        yield


quiet = _quiet_import
"""Context manager under which megatron objects are constructed and called."""

CUDA = torch.cuda.is_available()
VERSION = importlib.metadata.version("megatron-core")
if not SUPPORTED[0] <= tuple(int(part) for part in VERSION.split(".")[:2]) < SUPPORTED[1]:
    raise TrainerError(f"megatron-core {VERSION} is outside the tested range [0.19, 0.20)")

with _quiet_import():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

# After the imports: torch's compiler registers every torch.cuda function once and refuses a stand-in met twice.
PATCHED = apply_patches(plan_patches(CUDA))


def _restore_pickle_name() -> None:
    """The library swaps torch's storage loader for a stricter one under a name of its own, which then stands in every
    pickled tensor; engines admit torch's name only. The strict loader stays, its name is torch's again."""
    loader = torch.storage._load_from_bytes
    loader.__module__, loader.__name__, loader.__qualname__ = "torch.storage", "_load_from_bytes", "_load_from_bytes"


_restore_pickle_name()

# "GPTModel IS DEPRECATED" at every construction: the model is complete and pinned by SUPPORTED.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def device() -> torch.device:
    """Where this process keeps its model."""
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


def init_single_process(seed: int) -> None:
    """Make this process a world of its own (size 1) with all model-parallel groups, and seed every generator.

    Repeatable: a second call only seeds. Needs no port and no file, because a world of one meets nobody.
    """
    with quiet():
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", store=HashStore(), rank=0, world_size=1)
        if dist.get_world_size() != 1:
            raise TrainerError(f"a single-process trainer was started in a world of {dist.get_world_size()}")
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)


def close_process() -> None:
    """Undo `init_single_process`; a no-op where nothing is initialised."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def rng_state() -> dict[str, torch.Tensor]:
    """The state of every generator that training may draw from."""
    tracker: Any = get_cuda_rng_tracker()
    state = {f"tracker.{name}": value for name, value in tracker.get_states().items()}
    state["cpu"] = torch.get_rng_state()
    if CUDA:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put `rng_state()` back."""
    tracked = {name.removeprefix("tracker."): v for name, v in state.items() if name.startswith("tracker.")}
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(tracked)
    torch.set_rng_state(state["cpu"])
    if CUDA:
        torch.cuda.set_rng_state(state["cuda"])


__all__ = [
    "CUDA",
    "PATCHED",
    "VERSION",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "MegatronModule",
    "OptimizerConfig",
    "PackedSeqParams",
    "Patch",
    "RouterReplay",
    "RouterReplayAction",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "apply_patches",
    "close_process",
    "device",
    "device_literals",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "init_single_process",
    "plan_patches",
    "quiet",
    "rng_state",
    "set_rng_state",
]
