"""What is refused, with which status, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
import io

import pytest
from session_server_rig import broken_engine, make_config, with_r3

from segue.config.schema import Rollout

MESSAGES = [{"role": "user", "content": "w1"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES, "n": 2}, "n"),
        ({"messages": MESSAGES, "input_ids": [1]}, "input_ids"),
        ({"messages": MESSAGES, "logprob_start_len": 0}, "logprob_start_len"),
        ({"messages": MESSAGES, "routed_experts_start_len": 0}, "routed_experts_start_len"),
        ({"messages": MESSAGES, "lora_path": "x"}, "lora_path"),
        ({"messages": MESSAGES, "temperature": 0.3}, "temperature"),
        ({"messages": MESSAGES, "top_p": 0.9}, "top_p"),
        ({"messages": MESSAGES, "presence_penalty": 1.0}, "presence_penalty"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ({"messages": MESSAGES, "stop": [""]}, "stop"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "w1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({}, "messages"),
    ],
)
async def test_a_malformed_or_forbidden_field_is_400_and_named(rig_of, engine, body, param):
    async with rig_of(engine) as rig:
        session = await rig.open(purpose="train")
        error = await session.call("POST", "/v1/chat/completions", body, status=400)
        assert error["error"]["param"] == param
        assert set(error["error"]) >= {"type", "message", "param", "retryable"}
        assert (await session.view())["turns"] == []


async def test_harmless_unknown_fields_are_ignored(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open(purpose="train")
        await session.chat("w1", user="me", seed=3, temperature=1.0, top_p=1, parallel_tool_calls=False, extra=[1])


async def test_an_evaluation_session_may_choose_its_temperature(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open(purpose="eval")
        await session.chat("w1", temperature=0.3, top_p=0.9)


async def test_max_tokens_is_bounded_by_the_run_and_the_session(rig_of, slow_engine, model):
    config = make_config(model, rollout=Rollout(max_turn_tokens=6))
    async with rig_of(slow_engine, config=config) as rig:
        session = await rig.open(token_budget=30)
        one = await session.chat("w1", max_tokens=500)
        assert one["usage"]["completion_tokens"] == 6
        text = one["choices"][0]["message"]["content"]
        two = await session.chat("w1", text, "w2", max_completion_tokens=500)
        assert two["usage"]["total_tokens"] <= 30
        full = await session.chat("w1", text, "w2", two["choices"][0]["message"]["content"], "w3", status=400)
        assert full["error"]["type"] == "context_length_exceeded"


async def test_tokens_and_sessions_are_checked(rig_of, engine):
    async with rig_of(engine) as rig:
        session, other = await rig.open(), await rig.open()
        path = session.path + "/v1/chat/completions"
        body = {"messages": MESSAGES}
        await rig.call("POST", path, body, token="", status=401)
        await rig.call("POST", path, body, token="wrong", status=401)
        await rig.call("POST", path, body, token=other.opened["token"], status=401)
        await rig.call("POST", path, body, token="worker", status=403)
        await rig.call("POST", path, body, token="admin")
        await rig.call("POST", "/sessions/nothing/v1/chat/completions", body, token="x", status=404)
        await rig.call("POST", "/sessions", {}, token=session.opened["token"], status=401)
        await rig.call("POST", "/rollouts/lease", {}, token="admin", status=403)
        await rig.call("GET", "/nothing", status=404)
        await rig.call("PUT", "/sessions", status=405)
        await rig.call("GET", "/metrics", token="", status=401)
        assert b"segue_session_turns_total" in await rig.call("GET", "/metrics")
        for path in ("/healthz", "/readyz"):
            async with rig.http.get(rig.url + path) as answer:
                assert answer.status == 200


async def test_the_body_must_be_json_and_not_too_large(rig_of, engine, model):
    async with rig_of(engine) as rig:
        session = await rig.open()
        url, head = (
            session.opened["base_url"] + "/chat/completions",
            {"Authorization": f"Bearer {session.opened['token']}"},
        )
        async with rig.http.post(url, data=b"{", headers=head) as answer:
            assert answer.status == 400
        async with rig.http.post(url, data=b"[1]", headers=head) as answer:
            assert answer.status == 400
        async with rig.http.post(url, data=io.BytesIO(b" " * (17 * 2**20)), headers=head) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["type"] == "request_too_large"


async def test_after_the_end_410_and_rewards_409(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await session.chat("w1", max_tokens=3)
        first = await session.finish(reward=1)
        assert await session.finish(reward=0) == first
        await session.chat("w1", status=410)
        await session.call("GET", "", status=410)
        await session.call("POST", "/reward", {"value": 1, "key": "late"}, status=409)
        await session.call("DELETE", "", status=410)
        assert len(await rig.events("sample.ready")) == 1


async def test_a_deleted_session_gives_no_sample(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.admit(1)
        session = await rig.lease()
        await session.chat("w1", max_tokens=3)
        await session.call("DELETE", "", status=204)
        assert (await rig.events("sample.rejected"))[0].rollout_id == "train-0-0"
        assert (await rig.events("work.rollout_returned"))[0].final
        await session.chat("w1", status=410)
        assert (await rig.lease()).opened["rollout_id"] == "train-0-1"


async def test_deleting_cancels_a_pending_turn_at_the_engine(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        turn = asyncio.create_task(session.chat("w1", max_tokens=32, status=409))
        await rig.until("turn.started")
        await session.call("DELETE", "", status=204)
        await turn
        assert (await rig.events("turn.discarded"))[0].reason == "the session was deleted"


async def test_an_answer_of_the_engine_that_contradicts_itself_is_502(rig_of, model):
    async with broken_engine() as url, rig_of(url, config=with_r3(make_config(model))) as rig:
        session = await rig.open()
        error = await session.chat("w1", status=502)
        assert "route rows" in error["error"]["message"]
        assert (await rig.events("turn.failed"))[0].status == 502
        assert (await session.view())["turns"] == []
