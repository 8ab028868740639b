"""The same promises over the real engine on a CPU: a pause in mid-turn, exact rows, a sample that holds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from engines_under_test import ROUTES, START_DEADLINE_S, engine_options
from session_server_rig import make_config, text_of, with_r3, write_model
from tiny_models import make_tiny_moe

from actors.engines import launch_spec
from actors.engines.process import EngineProcess
from segue.blobs import BlobStore
from segue.config.schema import Rollout
from segue.events.turn import AbortTurns
from segue.wire.engine import GenerateRequest, SamplingParams, decode_answer, encode_request
from segue.wire.sample import sample_from_frame

LONG = 120


async def one_shot(url: str, ids: list[int]):
    """The engine's own account of these tokens: rows of all that are fed."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    request = GenerateRequest(
        rid="oracle", input_ids=ids, sampling_params=sampling, return_logprob=True, return_routed_experts=True
    )
    head = {"Content-Type": "application/json"}
    body = encode_request(request)
    async with aiohttp.ClientSession(headers=head) as http, http.post(url + "/generate", data=body) as answer:
        return decode_answer(await answer.read(), request, routes=ROUTES)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_session_over_sglang_with_a_pause_in_mid_turn(rig_of, tmp_path: Path):
    folder = make_tiny_moe(tmp_path / "model", vocab_size=64, seed=0)
    model_config = json.loads((folder / "config.json").read_text())
    write_model(folder)
    (folder / "config.json").write_text(json.dumps({**model_config, "eos_token_id": 2}))
    options = engine_options("sglang", folder, tmp_path / "engine.log")
    process = EngineProcess(launch_spec("sglang", options), name="sglang")
    await process.start(deadline_s=START_DEADLINE_S)
    try:
        config = make_config(folder, rollout=Rollout(max_turn_tokens=LONG))
        async with rig_of(options.url, config=with_r3(config)) as rig:
            await rig.admit(1)
            session = await rig.lease()
            first = await session.chat("w1 w2", max_tokens=10)
            for attempt in range(1, 6):  # the model may end a turn before it can be cut
                turn = asyncio.create_task(session.chat("w1 w2", text_of(first), f"w{attempt}", max_tokens=LONG))
                await rig.until("turn.started", count=1 + attempt)
                await asyncio.sleep(0.2)
                await rig.close(attempt)
                await rig.command(AbortTurns(pause=attempt, keep_partial=True, drain_s=0))
                await asyncio.sleep(1.0)
                await rig.resume(attempt)
                await turn
                await rig.admit(attempt + 1)
                if (await rig.events("turn.committed"))[-1].parts > 1:
                    break
            assert (await rig.events("turn.committed"))[-1].parts == 2
            await session.finish(reward=1.0)
            ready = (await rig.until("sample.ready"))[0]
            sample = sample_from_frame(BlobStore(tmp_path / "blobs").read(ready.frame))
            assert sample.routes.shape == (len(sample.tokens) - 1, ROUTES.layers, ROUTES.top_k)
            whole = await one_shot(options.url, sample.tokens.tolist())
            assert np.mean(sample.routes == whole.rows[: len(sample.routes)]) > 0.99
            assert ready.partial_turns == 1
    finally:
        await process.stop()
