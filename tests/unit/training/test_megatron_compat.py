"""The CPU stand-ins: exactly these names, none with CUDA, and a vanished target is an error."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

from segue.errors import TrainerError
from training.megatron import compat

pytestmark = pytest.mark.slow

NAMES = (
    "torch.cuda.current_device",
    "torch.cuda.get_rng_state",
    "torch.cuda.set_rng_state",
    "torch.cuda.manual_seed",
    "torch.cuda.synchronize",
    "torch.cuda.empty_cache",
    "torch.cuda.set_device",
    "torch.cuda.Stream",
    "torch.cuda.Event",
    "torch.cuda.current_stream",
    "torch.cuda.stream",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
)


def test_exactly_these_names_are_replaced_without_cuda() -> None:
    assert tuple(patch.name for patch in compat.plan_patches(False)) == NAMES
    patched = compat.PATCHED
    assert patched == (() if torch.cuda.is_available() else NAMES)


def test_nothing_is_replaced_with_cuda() -> None:
    assert compat.plan_patches(True) == ()


def test_a_name_that_vanished_is_an_error() -> None:
    with pytest.raises(TrainerError, match=r"torch\.cuda\.no_such_thing is gone"):
        compat.apply_patches((compat.Patch("torch.cuda", "no_such_thing", None),))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mode is a no-op with CUDA")
def test_device_literals_reach_the_cpu_inside_the_mode_only() -> None:
    with compat.device_literals():
        made = torch.zeros(2, device="cuda")
        assert made.cuda() is made
        assert made.pin_memory() is made
        assert made.type() == "torch.cuda.FloatTensor"
        assert made.type(torch.float64).dtype is torch.float64
    assert made.device.type == "cpu"
    assert made.type() == "torch.FloatTensor"


def test_initialising_twice_seeds_again_and_needs_no_port() -> None:
    compat.init_single_process(3)
    first = torch.rand(4)
    compat.init_single_process(3)
    assert torch.equal(first, torch.rand(4))


def test_generator_states_are_put_back() -> None:
    compat.init_single_process(3)
    state = compat.rng_state()
    first = torch.rand(4)
    compat.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))
    assert {"cpu", "tracker.model-parallel-rng"} <= state.keys()


def test_pickled_buckets_name_only_what_an_engine_admits() -> None:
    from training.weight_sync.tensor import serialise_bucket

    payload = serialise_bucket([("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))])
    found = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            found.add((module, name))
            return super().find_class(module, name)

    Recording(io.BytesIO(payload)).load()
    assert found <= {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "bfloat16"),
        ("torch", "float32"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("types", "SimpleNamespace"),
    }
    assert ("torch.storage", "_load_from_bytes") in found
