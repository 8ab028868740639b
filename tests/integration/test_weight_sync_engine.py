"""The trainer's weights in a real engine: equal bit by bit, and equal in what they say about the same tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from engines_under_test import START_DEADLINE_S, Engine, engine_options
from tiny_models import make_tiny_moe

from actors.engines import launch_spec
from actors.engines.http import EngineControl
from actors.engines.process import EngineProcess
from segue.wire.engine import GenerateRequest, SamplingParams
from segue.wire.sample import ROW_DECODED, Sample
from training import weight_sync
from training.protocol import TrainerOptions
from training.trainer import MegatronTrainer
from training.weight_sync.checksums import expected_checksums, prove_equal
from training.weight_sync.protocol import ChecksumError, SyncOptions
from training.weight_sync.source import manifest_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = (3, 14, 15, 9, 26, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("synced") / "moe", seed=3)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = engine_options("sglang", model, tmp_path_factory.mktemp("synced-engine") / "engine.log")
    process = EngineProcess(launch_spec("sglang", options), name="synced")
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(process.start(deadline_s=START_DEADLINE_S))
        try:
            yield options.url
        finally:
            runner.run(process.stop())


@pytest.fixture
async def engine(server: str) -> AsyncIterator[Engine]:
    async with EngineControl(server, name="synced") as control, aiohttp.ClientSession() as http:
        await control.probe()
        yield Engine("sglang", control, http)


@pytest.fixture(scope="module")
def trainer(model: Path) -> MegatronTrainer:
    return MegatronTrainer(TrainerOptions(model, lr=1e-2, replay_routes=True))


async def sampled(engine: Engine, member: int, version: int) -> Sample:
    """One answer of 24 tokens at temperature 1, as a training sample."""
    request = GenerateRequest(
        rid=uuid.uuid4().hex,
        input_ids=[*PROMPT, member],
        sampling_params=SamplingParams(max_new_tokens=24, temperature=1.0, ignore_eos=True),
        return_logprob=True,
        return_routed_experts=True,
    )
    answer = await engine.generate(request)
    assert answer.logprobs is not None
    assert answer.rows is not None
    tokens = np.array([*request.input_ids, *answer.output_ids], np.int32)
    start, count = len(request.input_ids), len(tokens)
    mask = (np.arange(count) >= start).astype(np.uint8)
    logprobs = np.zeros(count, np.float32)
    logprobs[start:] = answer.logprobs
    return Sample(
        sample_id=f"s{member}",
        rollout_id=f"r{member}",
        session_id=f"x{member}",
        group_id="g",
        member=member,
        reward=float(member % 2),
        temperature=1.0,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        turn_index=np.where(mask == 1, 0, -1).astype(np.int32),
        version_spans=np.array([(start + a, start + b, v) for a, b, v in answer.spans], np.int32),
        turn_rewards=np.array([float(member % 2)], np.float32),
        routes=answer.rows.astype(np.uint8),
        routes_provenance=np.full(count - 1, ROW_DECODED, np.uint8),
    )


@pytest.mark.parametrize("name", weight_sync.TRANSPORTS.names())
async def test_synced_weights_are_the_trainers_and_give_its_log_probs(
    engine: Engine, trainer: MegatronTrainer, model: Path, tmp_path: Path, name: str
) -> None:
    tensors = list(trainer.named_tensors())
    options = SyncOptions(bucket_bytes=200_000, folder=tmp_path, source=model)
    transport = weight_sync.create(name, options)

    async def sync(version: int) -> None:
        await engine.control.pause("retract")
        await transport.sync(trainer.named_tensors(), (engine.control,), version=version, manifest=manifest_of(tensors))
        await engine.control.resume()

    first = trainer.version + 100  # above the version that the engine was started with
    await sync(first)
    prove_equal(expected_checksums(trainer.named_tensors()), await engine.control.checksums())
    samples = [await sampled(engine, member, first) for member in range(4)]
    result = trainer.step(samples, step=1, version=first, seed=0)
    assert result.metrics["logprob_abs_diff_tokens"] == 4 * 24
    assert result.metrics["logprob_abs_diff_max"] < 1e-4
    with pytest.raises(ChecksumError):
        prove_equal(expected_checksums(trainer.named_tensors()), await engine.control.checksums())
    await sync(result.version)
    prove_equal(expected_checksums(trainer.named_tensors()), await engine.control.checksums())
    fresh = await sampled(engine, 5, result.version)
    metrics = trainer.step([fresh], step=2, version=result.version, seed=0).metrics
    assert metrics["logprob_abs_diff_tokens"] == 24
    assert metrics["logprob_abs_diff_max"] < 1e-4
