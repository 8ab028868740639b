"""What an environment sees: turns, leases, rewards, finish, and the errors in between."""

from __future__ import annotations

import openai
import pytest

from segue.blobs import BlobStore
from segue.wire.sample import sample_from_frame


async def test_turns_keep_every_token_and_become_a_sample(rig_of, engine, tmp_path):
    async with rig_of(engine) as rig:
        await rig.admit(1)
        session = await rig.lease()
        assert session.opened["rollout_id"] == "train-0-0"
        one = await session.chat("w1 w2", max_tokens=8)
        two = await session.chat("w1 w2", one["choices"][0]["message"]["content"], "w3", max_tokens=8)
        view = await session.view()
        assert [turn["parent_id"] for turn in view["turns"]] == [None, view["turns"][0]["turn_id"]]
        done = await session.finish(reward=0.5, metadata={"note": "x"})
        assert done["sample_id"] == "sample-train-0-0"
        assert done["turns"] == 2
        ready = (await rig.until("sample.ready"))[0]
        sample = sample_from_frame(BlobStore(tmp_path / "blobs").read(ready.frame))
        ids = [i for turn in view["turns"] for i in turn["prompt_ids"] + turn["output_ids"]]
        assert sample.tokens.tolist() == ids
        assert sample.reward == 0.5
        assert two["usage"]["prompt_tokens"] + two["usage"]["completion_tokens"] == len(ids)
        logprobs = [p for turn in view["turns"] for p in turn["logprobs"]]
        assert sample.logprobs[sample.loss_mask == 1].tolist() == pytest.approx(logprobs)
        assert sample.metadata["append_only"] == "proved"
        assert sample.metadata["note"] == "x"


async def test_the_unmodified_openai_client_works(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        async with openai.AsyncOpenAI(base_url=session.opened["base_url"], api_key=session.opened["token"]) as client:
            messages = [{"role": "user", "content": "w1"}]
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=5, logprobs=True)
            assert answer.choices[0].message.content
            assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "w2"}]
            await client.chat.completions.create(model="any", messages=messages, max_tokens=5)
        turns = (await session.view())["turns"]
        assert turns[1]["parent_id"] == turns[0]["turn_id"]
