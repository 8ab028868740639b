"""Every weight transport: what arrives equals what was sent, nothing bad is sent, no failure passes unnoticed."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_world import write_model

from segue.errors import ConfigError, EngineError
from training import weight_sync
from training.digest import digest_tensors
from training.megatron.hf import read_folder
from training.weight_sync.checksums import expected_checksums, prove_equal
from training.weight_sync.protocol import ChecksumError, SyncOptions, TornSyncError, Transport, WeightCheckError
from training.weight_sync.source import atomic_key, manifest_of, plan_buckets

Tensors = list[tuple[str, torch.Tensor]]


class FakeReceiver:
    """An engine that loads like the real one and keeps a journal; fails at the `fail_at`-th load."""

    def __init__(self, fail_at: int = -1) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.journal: list[str] = []
        self.flushes: list[bool] = []
        self.version = -1
        self._fail_at = fail_at

    def _loading(self, flush_cache: bool) -> None:
        self.journal.append("load")
        self.flushes.append(flush_cache)
        if len(self.flushes) - 1 == self._fail_at:
            raise EngineError("success=false")

    async def begin(self) -> None:
        self.journal.append("begin")

    async def load_tensors(
        self, serialized: bytes, *, load_format: str | None, version: int, flush_cache: bool
    ) -> None:
        assert self.journal.count("begin") == self.journal.count("end") + 1
        assert load_format == "flattened_bucket"
        self._loading(flush_cache)
        bucket = pickle.loads(serialized)
        for entry in bucket["metadata"]:
            raw = bucket["flattened_tensor"][entry.start_idx : entry.end_idx]
            assert raw.numel() == entry.numel
            self.weights[entry.name] = raw.view(entry.dtype).reshape(entry.shape).clone()

    async def load_disk(self, path: str, *, version: int, flush_cache: bool) -> None:
        self._loading(flush_cache)
        self.weights = dict(read_folder(Path(path)))

    async def end(self) -> None:
        self.journal.append("end")

    async def set_version(self, version: int) -> None:
        self.journal.append("version")
        self.version = version

    async def checksums(self) -> dict[str, str]:
        return expected_checksums(self.weights.items())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sync") / "model", "qwen3_moe")


@pytest.fixture
def tensors(source: Path) -> Tensors:
    from training.megatron.hf import parameter_map
    from training.megatron.shape import read_shape

    state = load_file(source / "model.safetensors")
    return [(name, state[name]) for entry in parameter_map(read_shape(source)) for name in entry.names]


@pytest.fixture(params=weight_sync.TRANSPORTS.names())
def transport(request: pytest.FixtureRequest, tmp_path: Path, source: Path) -> Transport:
    return weight_sync.create(
        request.param, SyncOptions(bucket_bytes=20_000, folder=tmp_path / "weights", source=source, load_timeout_s=5)
    )


async def test_every_tensor_arrives_bit_for_bit_at_every_receiver(transport: Transport, tensors: Tensors) -> None:
    receivers = (FakeReceiver(), FakeReceiver())
    report = await transport.sync(iter(tensors), receivers, version=3, manifest=manifest_of(tensors))
    for receiver in receivers:
        assert receiver.weights.keys() == dict(tensors).keys()
        assert all(torch.equal(receiver.weights[name], tensor) for name, tensor in tensors)
        prove_equal(expected_checksums(tensors), await receiver.checksums())
        assert receiver.version == 3
        assert receiver.journal[-1] == "version"
    assert report.version == 3
    assert report.digest == digest_tensors(tensors)
    assert report.sent_bytes == sum(t.nbytes for _, t in tensors)
    assert report.buckets == receivers[0].journal.count("load")


@pytest.mark.parametrize("flush", [True, False])
async def test_the_cache_is_flushed_once_at_the_end_or_never(
    transport: Transport, tensors: Tensors, flush: bool
) -> None:
    receiver = FakeReceiver()
    await transport.sync(tensors, (receiver,), version=1, manifest=manifest_of(tensors), flush_cache=flush)
    assert receiver.flushes[-1] is flush
    assert not any(receiver.flushes[:-1])


def bad_nan(tensors: Tensors) -> Tensors:
    broken = tensors[5][1].clone()
    broken.view(-1)[0] = float("nan")
    return [*tensors[:5], (tensors[5][0], broken), *tensors[6:]]


FAULTS: dict[str, Callable[[Tensors], Tensors]] = {
    "not finite": bad_nan,
    "is missing": lambda t: t[:-1],
    "comes twice": lambda t: [*t, t[0]],
    "not in the manifest": lambda t: [*t, ("model.extra", torch.zeros(1))],
    r"promised torch\.float32": lambda t: [(t[0][0], t[0][1].bfloat16()), *t[1:]],
    "promised": lambda t: [(t[0][0], t[0][1][1:]), *t[1:]],
}


@pytest.mark.parametrize("message", FAULTS)
async def test_a_fault_at_the_source_is_found_before_the_receiver_is_touched(
    transport: Transport, tensors: Tensors, message: str
) -> None:
    receiver = FakeReceiver()
    with pytest.raises(WeightCheckError, match=message):
        await transport.sync(FAULTS[message](tensors), (receiver,), version=1, manifest=manifest_of(tensors))
    assert receiver.journal == []


async def test_a_refused_load_tears_the_sync_and_closes_it_everywhere(transport: Transport, tensors: Tensors) -> None:
    good, bad = FakeReceiver(), FakeReceiver(fail_at=0)
    with pytest.raises(TornSyncError, match="success=false"):
        await transport.sync(tensors, (good, bad), version=2, manifest=manifest_of(tensors))
    for receiver in (good, bad):
        assert receiver.version == -1, "a torn version is never published"
        assert receiver.journal.count("begin") == receiver.journal.count("end")


async def test_a_torn_sync_can_be_repeated(transport: Transport, tensors: Tensors) -> None:
    receiver = FakeReceiver(fail_at=0)
    with pytest.raises(TornSyncError):
        await transport.sync(tensors, (receiver,), version=2, manifest=manifest_of(tensors))
    await transport.sync(tensors, (receiver,), version=2, manifest=manifest_of(tensors))
    prove_equal(expected_checksums(tensors), await receiver.checksums())
    assert receiver.version == 2


async def test_a_receiver_that_never_answers_is_bounded(tensors: Tensors, tmp_path: Path, source: Path) -> None:
    class Silent(FakeReceiver):
        async def load_tensors(self, *args: object, **kwargs: object) -> None:
            await asyncio.sleep(3600)

        async def load_disk(self, *args: object, **kwargs: object) -> None:
            await asyncio.sleep(3600)

    for name in weight_sync.TRANSPORTS.names():
        options = SyncOptions(folder=tmp_path / name, source=source, load_timeout_s=0.05)
        with pytest.raises(TornSyncError, match="TimeoutError"):
            await weight_sync.create(name, options).sync(tensors, (Silent(),), version=1, manifest=manifest_of(tensors))


async def test_cancellation_passes_through_and_closes_the_update(transport: Transport, tensors: Tensors) -> None:
    class Cancelling(FakeReceiver):
        def _loading(self, flush_cache: bool) -> None:
            super()._loading(flush_cache)
            raise asyncio.CancelledError

    receiver = Cancelling()
    with pytest.raises(asyncio.CancelledError):
        await transport.sync(tensors, (receiver,), version=1, manifest=manifest_of(tensors))
    assert receiver.journal.count("begin") == receiver.journal.count("end")
    assert receiver.version == -1


@pytest.mark.parametrize("size", [1, 5_000, 20_000, 10**9])
def test_buckets_hold_everything_once_in_order_and_never_split_a_fused_group(tensors: Tensors, size: int) -> None:
    buckets = plan_buckets(tensors, size)
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in tensors]
    where = {name: i for i, bucket in enumerate(buckets) for name, _ in bucket}
    for name in where:
        for other in where:
            if atomic_key(name) == atomic_key(other):
                assert where[name] == where[other]
    for bucket in buckets:
        keys = {atomic_key(name) for name, _ in bucket}
        assert sum(t.nbytes for _, t in bucket) <= size or len(keys) == 1


def test_fused_groups_are_known_by_name() -> None:
    layer = "model.layers.3.self_attn"
    assert (
        atomic_key(f"{layer}.k_proj.bias") == atomic_key(f"{layer}.q_proj.bias") != atomic_key(f"{layer}.k_proj.weight")
    )
    assert atomic_key(f"{layer}.o_proj.weight") == f"{layer}.o_proj.weight"
    expert = "model.layers.0.mlp.experts"
    assert atomic_key(f"{expert}.1.up_proj.weight") == atomic_key(f"{expert}.1.gate_proj.weight")
    assert atomic_key(f"{expert}.1.up_proj.weight") != atomic_key(f"{expert}.2.up_proj.weight")


def test_checksums_are_those_of_the_engines_fused_tensors(tensors: Tensors) -> None:
    state = dict(tensors)
    sums = expected_checksums(tensors)
    layer = "model.layers.1"

    def rule(value: torch.Tensor) -> str:
        number = int.from_bytes(hashlib.sha256(np.ascontiguousarray(value.numpy()).tobytes()).digest()[:8], "big")
        return f"{number:016x}"

    qkv = torch.cat([state[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert sums[f"{layer}.self_attn.qkv_proj.weight"] == rule(qkv)
    padding = torch.zeros(8, 32)  # 24 rows of an expert's ffn become 32
    experts = []
    for e in range(4):
        gate, up = (state[f"{layer}.mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up"))
        experts.append(torch.cat([gate, padding, up, padding]))
    assert sums[f"{layer}.mlp.experts.w13_weight"] == rule(torch.stack(experts))
    assert f"{layer}.mlp.experts.w2_weight" in sums
    assert not any("gate_proj" in name for name in sums)


def test_one_changed_bit_or_an_unknown_parameter_is_found(tensors: Tensors) -> None:
    expected = expected_checksums(tensors)
    changed = dict(tensors)
    changed["model.norm.weight"] = changed["model.norm.weight"].clone()
    changed["model.norm.weight"].view(torch.int32)[0] ^= 1
    with pytest.raises(ChecksumError, match=r"1 of \d+ .*model\.norm\.weight"):
        prove_equal(expected, expected_checksums(changed.items()))
    with pytest.raises(ChecksumError, match="tid2eid"):
        prove_equal(expected, expected | {"model.tid2eid": "0"})


async def test_old_folders_go_once_all_have_loaded(tensors: Tensors, tmp_path: Path, source: Path) -> None:
    transport = weight_sync.create("disk", SyncOptions(folder=tmp_path / "w", source=source, keep=2))
    for version in range(4):
        await transport.sync(tensors, (FakeReceiver(),), version=version, manifest=manifest_of(tensors))
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["weights_v000002", "weights_v000003"]


def test_unknown_transports_and_missing_folders_are_refused() -> None:
    with pytest.raises(ConfigError, match="disk, tensor"):
        weight_sync.create("broadcast", SyncOptions())
    with pytest.raises(ConfigError, match="folder"):
        weight_sync.create("disk", SyncOptions())
