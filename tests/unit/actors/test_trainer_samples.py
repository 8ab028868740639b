"""The trainer's side of a rollout with several leaves: unpacked whole, weighed once."""

from __future__ import annotations

import dataclasses

import numpy as np
from trainer_world import make_sample

from actors.trainer import TrainerActor
from segue.boot import Endpoints, RunContext
from segue.config.schema import Config
from segue.wire.mask import SamplingMask
from segue.wire.sample import sample_to_frame, samples_to_bundle
from training import advantages


async def test_a_frame_gives_all_samples_of_its_rollout(tmp_path) -> None:
    ends = Endpoints(
        log_url="", router_url="", ray_address="", ray_temp_dir="", session_urls=(), admin_token="", worker_token=""
    )  # fmt: skip
    actor = TrainerActor(RunContext("run", tmp_path, Config(), ends))
    one = make_sample(0)
    kept = [[int(t), 63] if m and t != 63 else [int(t)] for t, m in zip(one.tokens, one.loss_mask, strict=True)]
    one = dataclasses.replace(one, mask=SamplingMask.of(kept))
    two = dataclasses.replace(one, sample_id="other")
    for samples in ([one], [one, two]):
        digest = actor.blobs.put(samples_to_bundle(samples, with_mask=True))
        found = await actor._samples(digest)
        assert [sample_to_frame(s, with_mask=True) for s in found] == [
            sample_to_frame(s, with_mask=True) for s in samples
        ]


def test_a_rollout_counts_once_in_its_group_however_many_leaves_it_has() -> None:
    good = [dataclasses.replace(make_sample(0), rollout_id="a", reward=1.0, sample_id=f"a.{i}") for i in range(5)]
    bad = dataclasses.replace(make_sample(1), rollout_id="b", reward=0.0)
    same = [dataclasses.replace(sample, group_id="g") for sample in (*good, bad)]
    values = advantages.create("group_centred")(same)
    for sample, value in zip(same, values, strict=True):
        wanted = (0.5 if sample.rollout_id == "a" else -0.5) * sample.loss_mask
        assert np.array_equal(value, wanted.astype(np.float32))
