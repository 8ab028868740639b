"""Chat completions as OpenAI's own helpers read them: tool-call deltas, usage, log-probs, seed, stop."""

from __future__ import annotations

import openai
import pytest
from dialect_rig import ASK, CALL, SAID, chat_conversation, chat_tool, speaking, token_ids

TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def client_of(session):
    return openai.AsyncOpenAI(base_url=session.opened["base_url"], api_key=session.opened["token"], max_retries=0)


async def test_a_streamed_conversation_is_the_whole_one(rig_of, spelling):
    async with speaking(rig_of, spelling, CALL, SAID) as (rig, _engine):
        whole = await rig.open()
        history = await chat_conversation(whole, stream=False)
        assert history[-1]["content"] == SAID
        found = await token_ids(whole)
    async with speaking(rig_of, spelling, CALL, SAID) as (rig, _engine):
        streamed = await rig.open()
        await chat_conversation(streamed, stream=True)
        assert found == await token_ids(streamed)


async def test_several_tool_calls_are_put_together_by_the_client(rig_of, spelling):
    async with speaking(rig_of, spelling, TWO_CALLS) as (rig, _engine):
        session = await rig.open()
        given = {"model": "any", "messages": [{"role": "user", "content": ASK}], "tools": [chat_tool("weather")]}
        async with client_of(session) as client, client.chat.completions.stream(**given) as events:
            answer = (await events.get_final_completion()).choices[0]
        assert [call.function.arguments for call in answer.message.tool_calls] == [
            '{"city": "Köln"}',
            '{"city": "Bonn"}',
        ]
        assert answer.finish_reason == "tool_calls"
        stored = (await session.view())["turns"][0]["messages"][-1]
        assert [call["id"] for call in stored["tool_calls"]] == [call.id for call in answer.message.tool_calls]
        assert stored["content"] == answer.message.content


async def test_strict_tools_are_shown_like_others(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, engine):
        plain = chat_tool("weather")
        del plain["function"]["strict"]
        for tool in (plain, chat_tool("weather")):
            session = await rig.open()
            await session.chat("a", tools=[tool])
        assert engine.bodies[0]["input_ids"] == engine.bodies[1]["input_ids"]


async def test_usage_and_logprobs_come_with_the_stream(rig_of, spelling):
    async with speaking(rig_of, spelling, "abc") as (rig, _engine):
        session = await rig.open()
        given = {"model": "any", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
        options = {"stream_options": {"include_usage": True}}
        async with client_of(session) as client, client.chat.completions.stream(**given, **options) as events:
            answer = await events.get_final_completion()
        assert answer.usage.completion_tokens == len("abc") + 1
        told = answer.choices[0].logprobs.content
        assert [entry.token for entry in told] == ["a", "b", "c", "<|im_end|>"]
        turn = (await session.view())["turns"][0]
        assert [entry.logprob for entry in told] == pytest.approx(turn["logprobs"])


async def test_seed_and_stop_reach_the_engine(rig_of, spelling):
    async with speaking(rig_of, spelling, "one two three") as (rig, engine):
        session = await rig.open()
        answer = await session.chat("a", seed=7, stop="two")
        assert answer["choices"][0]["message"]["content"] == "one "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert engine.bodies[0]["sampling_params"]["sampling_seed"] == 7
        await (await rig.open()).chat("a")
        assert engine.bodies[1]["sampling_params"].get("sampling_seed") is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"), ({"seed": -1}, "seed"), ({"seed": "x"}, "seed"),
        ({"n": 2}, "n"), ({"tool_choice": "required", "tools": [chat_tool("f")]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"), ({"model": 3}, "model"),
        ({"stream_options": 1}, "stream_options"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_and_named(rig_of, spelling, body, param):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()
        error = await session.chat("a", status=400, **body)
        assert error["error"]["param"] == param
