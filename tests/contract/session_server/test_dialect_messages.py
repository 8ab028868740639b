"""Anthropic's unmodified client on a session: whole and streamed, with tools, and the same tokens as in chat."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest
from dialect_rig import ASK, CALL, SAID, TOOL_RESULT, chat_conversation, chat_tool, speaking, token_ids

TOOL = {
    "name": "weather", "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip


def client_of(session, kind=anthropic.AsyncAnthropic, **options):
    url = session.opened["base_url"].removesuffix("/v1")
    return kind(base_url=url, api_key=session.opened["token"], max_retries=0, **options)


async def conversation(session, stream: bool) -> None:
    """Two turns with a tool between them, as an agent plays them."""
    history = [{"role": "user", "content": ASK}]
    given = {"model": "any", "max_tokens": 200, "tools": [TOOL], "system": "Be brief."}
    async with client_of(session) as client:
        for _ in range(2):
            if stream:
                async with client.messages.stream(messages=history, **given) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=history, **given)
            history.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason == "tool_use":
                call = answer.content[-1]
                assert (call.name, call.input) == ("weather", {"city": "Köln"})
                result = {"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT}
                history.append({"role": "user", "content": [result]})
    assert [block.type for block in history[1]["content"]] == ["text", "tool_use"]
    assert answer.content[0].text == SAID
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_has_the_tokens_of_the_same_one_in_chat(rig_of, spelling, stream):
    async with speaking(rig_of, spelling, CALL, SAID) as (rig, _engine):
        session = await rig.open()
        await conversation(session, stream)
        assert [turn["finish_reason"] for turn in (await session.view())["turns"]] == ["tool_calls", "stop"]
        found = await token_ids(session)
    async with speaking(rig_of, spelling, CALL, SAID) as (rig, _engine):
        session = await rig.open()
        await chat_conversation(session, stream=False)
        assert found == await token_ids(session)


async def test_the_blocking_client_speaks_it_too(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()

        def talk():
            with (
                client_of(session, anthropic.Anthropic) as client,
                client.messages.stream(
                    model="any", max_tokens=50, messages=[{"role": "user", "content": "a"}]
                ) as events,
            ):
                pieces = list(events.text_stream)
                return pieces, events.get_final_message()

        pieces, answer = await asyncio.to_thread(talk)
        assert len(pieces) > 3
        assert "".join(pieces) == answer.content[0].text == SAID
        assert answer.usage.output_tokens == len(SAID.encode()) + 1
        turn = (await session.view())["turns"][0]
        assert answer.usage.input_tokens == len(turn["prompt_ids"])


@pytest.mark.parametrize("stream", [False, True])
async def test_endings_are_named_as_the_vendor_names_them(rig_of, spelling, stream):
    async def ended(**more):
        session = await rig.open()
        async with client_of(session) as client:
            given = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "a"}], **more}
            if stream:
                async with client.messages.stream(**given) as events:
                    return await events.get_final_message()
            return await client.messages.create(**given)

    async with speaking(rig_of, spelling, "one two three") as (rig, engine):
        assert (await ended()).stop_reason == "end_turn"
        cut = await ended(max_tokens=4)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one ")
        stopped = await ended(stop_sequences=["zzz", "two"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
        assert engine.bodies[-1]["sampling_params"]["stop"] == ["zzz", "two"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"input_ids": [1]}, "input_ids"),
        ({"top_k": 5}, "top_k"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_the_vendors_shape(rig_of, spelling, change, param):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open(purpose="train")
        body = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **change}
        error = await session.call("POST", "/v1/messages", body, status=400)
        assert error["type"] == "error"
        assert (error["error"]["type"], error["error"]["param"]) == ("invalid_request_error", param)
        assert (await session.view())["turns"] == []


async def test_the_client_raises_its_own_errors(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()
        given = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        async with client_of(session) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="wrong").messages.create(**given)
            await session.call("DELETE", "", status=204)
            with pytest.raises(anthropic.APIStatusError, match="is over") as gone:
                await client.messages.create(**given)
        assert gone.value.status_code == 410
        async with client_of(session) as client:
            url = session.opened["base_url"].replace(session.opened["session_id"], "never").removesuffix("/v1")
            with pytest.raises(anthropic.NotFoundError):
                await client.with_options(base_url=url).messages.create(**given)


async def test_arguments_that_are_no_object_come_back_as_they_were(rig_of, spelling):
    odd = '<tool_call>\n{"name": "weather", "arguments": [1,  2]}\n</tool_call>'
    async with speaking(rig_of, spelling, odd, SAID) as (rig, _engine):
        session = await rig.open()
        history = [{"role": "user", "content": ASK}]
        async with client_of(session) as client:
            for _ in range(2):
                async with client.messages.stream(
                    model="any", max_tokens=200, tools=[TOOL], messages=history
                ) as events:
                    answer = await events.get_final_message()
                history.append({"role": "assistant", "content": answer.content})
                if answer.stop_reason == "tool_use":
                    result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "x"}
                    history.append({"role": "user", "content": [result]})
        turns = (await session.view())["turns"]
        assert turns[1]["parent_id"] == turns[0]["turn_id"]


async def test_a_session_may_mix_dialects(rig_of, spelling):
    async with speaking(rig_of, spelling, CALL, SAID, SAID) as (rig, _engine):
        session = await rig.open()
        system = {"role": "system", "content": "Be brief."}
        async with client_of(session) as client:
            first = await client.messages.create(
                model="any",
                max_tokens=200,
                tools=[TOOL],
                system="Be brief.",
                messages=[{"role": "user", "content": ASK}],
            )
        call = first.content[-1]
        spelled = {"name": "weather", "arguments": json.dumps(call.input, ensure_ascii=False)}
        calls = [{"id": call.id, "type": "function", "function": spelled}]
        history = [
            system, {"role": "user", "content": ASK},
            {"role": "assistant", "content": first.content[0].text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT},
        ]  # fmt: skip
        body = {"messages": history, "tools": [chat_tool(TOOL["name"])]}
        await session.call("POST", "/v1/chat/completions", body)
        turns = (await session.view())["turns"]
        assert turns[1]["parent_id"] == turns[0]["turn_id"]
