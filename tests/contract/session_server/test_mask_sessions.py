"""A run that cuts its sampling: what each token was chosen from is a fact of it, from the engine to the frame."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from session_server_rig import make_config, text_of, with_r3

from actors.engines.fake.model import model_of
from segue.blobs import BlobStore
from segue.config.schema import Rollout
from segue.errors import CodecError
from segue.events.turn import AbortTurns
from segue.wire.frame import decode_frame
from segue.wire.sample import Sample, sample_from_frame, sample_to_frame

TOP_K = 4


@pytest.fixture
def cut_config(model: Path):
    rollout = Rollout(max_turn_tokens=40, turn_deadline_s=20.0, top_k=TOP_K, top_p=0.9, min_p=0.01)
    return with_r3(make_config(model, rollout=rollout))


def check_sample_masks(sample: Sample) -> None:
    assert sample.mask is not None
    for at in range(len(sample.tokens)):
        kept = sample.mask.support(at)
        assert len(kept) == (TOP_K if sample.loss_mask[at] else 1)
        assert sample.tokens[at] in kept
        assert sample.logprobs[at] == pytest.approx(-math.log(TOP_K) if sample.loss_mask[at] else 0.0)


async def sample_of(rig, tmp_path: Path) -> Sample:
    ready = (await rig.until("sample.ready"))[0]
    return sample_from_frame(BlobStore(tmp_path / "blobs").read(ready.frame), with_mask=True)


async def test_the_kept_sets_of_all_turns_are_in_the_sample(rig_of, engine, cut_config, model, tmp_path):
    async with rig_of(engine, config=cut_config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        first = await session.chat("w1 w2", max_tokens=5)
        await session.chat("w1 w2", text_of(first), "w3", max_tokens=7)
        await session.finish(reward=1)
        sample = await sample_of(rig, tmp_path)
        check_sample_masks(sample)
        fake, ids = model_of(model, eos_p=0.05), sample.tokens.tolist()
        for at in np.flatnonzero(sample.loss_mask).tolist():
            expected = fake.kept(ids[at], fake.state_of(ids[:at]), TOP_K)
            assert sample.mask.support(at).tolist() == sorted(expected)


async def test_readers_that_do_not_ask_get_the_frame_without_masks(rig_of, engine, cut_config):
    async with rig_of(engine, config=cut_config) as rig:
        session = await rig.open(purpose="train")
        await session.chat("w1", max_tokens=4)
        plain, whole = await session.call("GET", "/samples"), await session.call("GET", "/samples?masks=true")
        assert "mask_ids" not in decode_frame(plain).arrays
        with pytest.raises(CodecError, match="has a sampling mask, which this reader does not ask for"):
            sample_from_frame(whole)
        sample = sample_from_frame(whole, with_mask=True)
        check_sample_masks(sample)
        assert sample_to_frame(sample) == plain
        assert sample_to_frame(sample, with_mask=True) == whole


async def test_a_run_that_does_not_cut_records_none(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open(purpose="train")
        await session.chat("w1", max_tokens=4)
        assert await session.call("GET", "/samples") == await session.call("GET", "/samples?masks=true")


async def test_masks_of_a_cut_turn_join(rig_of, slow_engine, cut_config, model, tmp_path):
    async with rig_of(slow_engine, config=cut_config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        turn = asyncio.create_task(session.chat("w1 w2", max_tokens=40))
        await rig.until("turn.started")
        await asyncio.sleep(0.15)
        await rig.close(1)
        await rig.command(AbortTurns(pause=1, keep_partial=True, drain_s=0))
        kept = (await rig.until("turn.interrupted"))[0]
        assert kept.kept_tokens > 0
        frame = decode_frame(BlobStore(tmp_path / "blobs").read(kept.tokens))
        assert len(frame.array("mask_offsets", np.int64)) == kept.kept_tokens + 1
        await rig.resume(1)
        await turn
        await session.finish(reward=1)
        check_sample_masks(await sample_of(rig, tmp_path))


async def test_masks_survive_a_restart(rig_of, engine, cut_config, tmp_path):
    async with rig_of(engine, config=cut_config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        first = await session.chat("w1 w2", max_tokens=5)
        before = await session.call("GET", "/samples?masks=true")
        await rig.stop()
        await rig.start()
        assert await session.call("GET", "/samples?masks=true") == before
        await session.chat("w1 w2", text_of(first), "w3", max_tokens=5)
        await session.finish(reward=1)
        check_sample_masks(await sample_of(rig, tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1), ("top_k", 0), ("top_k", TOP_K + 1), ("top_k", 2.5), ("top_p", 0.95), ("top_p", 1.0),
        ("min_p", 0.0), ("temperature", 0.5), ("frequency_penalty", 0.1), ("presence_penalty", 0.1),
        ("repetition_penalty", 1.1), ("logit_bias", {"3": 1.0}), ("return_sampling_mask", False),
        ("custom_logit_processor", "x"),
    ],
)  # fmt: skip
async def test_what_could_not_be_replayed_is_refused_by_its_name(rig_of, engine, cut_config, field, value):
    async with rig_of(engine, config=cut_config) as rig:
        session = await rig.open(purpose="train")
        error = await session.chat("w1", status=400, **{field: value})
        assert error["error"]["param"] == field
        assert (await session.view())["turns"] == []


async def test_a_least_length_is_refused_where_no_kept_set_shows_what_it_bars(rig_of, engine, cut_config, model):
    """The engine bars the end of the answer and normalises over the rest."""
    async with rig_of(engine) as rig:
        session = await rig.open(purpose="train")
        error = await session.chat("w1", status=400, min_tokens=3)
        assert error["error"]["param"] == "min_tokens"
        await session.chat("w1", min_tokens=0)
        await (await rig.open(purpose="eval")).chat("w1", min_tokens=3)
    async with rig_of(engine, config=cut_config) as rig:
        answer = await (await rig.open(purpose="train")).chat("w1", min_tokens=5)
        assert answer["usage"]["completion_tokens"] >= 5


async def test_a_request_may_cut_deeper_than_its_run(rig_of, engine, cut_config):
    async with rig_of(engine, config=cut_config) as rig:
        session = await rig.open(purpose="train")
        await session.chat("w1", max_tokens=4, top_k=2, top_p=0.5, min_p=0.2, temperature=1.0)
        sample = sample_from_frame(await session.call("GET", "/samples?masks=true"), with_mask=True)
        assert np.diff(sample.mask.offsets)[sample.loss_mask == 1].tolist() == [2] * int(sample.loss_mask.sum())


@pytest.mark.parametrize("purpose", ["eval", "serve"])
async def test_sessions_that_do_not_train_are_free_and_record_none(rig_of, engine, cut_config, purpose):
    async with rig_of(engine, config=cut_config) as rig:
        session = await rig.open(purpose=purpose)
        await session.chat("w1", max_tokens=4, temperature=0.3, top_p=0.99)
        assert sample_from_frame(await session.call("GET", "/samples?masks=true")).mask is None


async def test_the_token_level_route_follows_the_same_rules(rig_of, engine, cut_config):
    async with rig_of(engine, config=cut_config) as rig:
        session = await rig.open(purpose="train")
        error = await session.call("POST", "/generate", {"input_ids": [5, 6], "top_k": 50}, 400)
        assert error["error"]["param"] == "top_k"
        await session.call("POST", "/generate", {"input_ids": [5, 6], "max_new_tokens": 3})
        check_sample_masks(sample_from_frame(await session.call("GET", "/samples?masks=true"), with_mask=True))


async def test_without_partial_rollouts_a_cut_turn_starts_with_no_mask(rig_of, slow_engine, cut_config, tmp_path):
    config = msgspec.structs.replace(cut_config, rollout=msgspec.structs.replace(cut_config.rollout, partial=False))
    async with rig_of(slow_engine, config=config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        turn = asyncio.create_task(session.chat("w1 w2", max_tokens=30))
        await rig.until("turn.started")
        await asyncio.sleep(0.1)
        await rig.close(1)
        await rig.command(AbortTurns(pause=1, keep_partial=False, drain_s=0))
        await rig.until("turn.discarded")
        await rig.resume(1)
        await turn
        await session.finish(reward=1)
        check_sample_masks(await sample_of(rig, tmp_path))
