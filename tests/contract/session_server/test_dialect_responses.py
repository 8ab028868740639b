"""OpenAI's unmodified client on a session by way of Responses: whole and streamed, tools, previous_response_id."""

from __future__ import annotations

import asyncio

import openai
import pytest
from dialect_rig import ASK, CALL, SAID, TOOL_RESULT, chat_conversation, chat_tool, speaking, token_ids

TOOL = {
    "type": "function", "name": "weather", "description": "Tells the weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip


def client_of(session, kind=openai.AsyncOpenAI):
    return kind(base_url=session.opened["base_url"], api_key=session.opened["token"], max_retries=0)


async def answered(client, stream: bool, **given):
    if not stream:
        return await client.responses.create(model="any", **given)
    async with client.responses.stream(model="any", **given) as events:
        return await events.get_final_response()


async def conversation(session, *, stream: bool, linked: bool) -> None:
    """Two turns with a tool between them. `linked`: by previous_response_id instead of the whole history."""
    history, previous = [{"role": "user", "content": ASK}], {}
    async with client_of(session) as client:
        while True:
            answer = await answered(
                client, stream, input=history, instructions="Be brief.", tools=[TOOL], max_output_tokens=200, **previous
            )
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            assert (calls[0].name, calls[0].arguments) == ("weather", '{"city": "Köln"}')
            result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": TOOL_RESULT}
            if linked:
                history, previous = [result], {"previous_response_id": answer.id}
            else:
                history += [*answer.output, result]
    assert answer.output_text == SAID
    assert answer.status == "completed"
    assert answer.usage.output_tokens == len(SAID.encode()) + 1


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_has_the_tokens_of_the_same_one_in_chat(rig_of, spelling, stream, linked):
    async with speaking(rig_of, spelling, CALL, SAID) as (rig, _engine):
        session = await rig.open()
        await conversation(session, stream=stream, linked=linked)
        found = await token_ids(session)
    async with speaking(rig_of, spelling, CALL, SAID) as (rig, _engine):
        session = await rig.open()
        await chat_conversation(session, stream=True)
        assert found == await token_ids(session)


async def test_the_blocking_client_gets_every_event_in_order(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()

        def talk():
            with client_of(session, openai.OpenAI) as client:
                return list(client.responses.create(model="any", input="a", stream=True))

        events = await asyncio.to_thread(talk)
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert len(deltas) > 3
        assert "".join(deltas) == SAID
        assert kinds[:4] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
        ]  # fmt: skip
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        streamed = events[-2].item
        assert events[-1].response.output[0].model_dump() == streamed.model_dump()


async def test_an_answer_that_was_cut_is_incomplete(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()
        async with client_of(session) as client:
            answer = await client.responses.create(model="any", input="a", max_output_tokens=5)
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert answer.output_text == SAID[:5]
            events = [
                e async for e in await client.responses.create(model="any", input="a", max_output_tokens=5, stream=True)
            ]
        assert events[-1].type == "response.incomplete"


async def test_a_response_is_continued_where_it_was_named_though_another_says_the_same(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()
        async with client_of(session) as client:
            one = await client.responses.create(model="any", input="a")
            two = await client.responses.create(model="any", input="a")
            assert one.id != two.id
            await client.responses.create(model="any", input="b", previous_response_id=one.id)
        turns = (await session.view())["turns"]
        assert [turn["parent_id"] for turn in turns] == [None, None, turns[0]["turn_id"]]


async def test_other_instructions_begin_another_branch(rig_of, spelling):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()
        async with client_of(session) as client:
            one = await client.responses.create(model="any", input="a", instructions="Be brief.")
            await client.responses.create(model="any", input="b", previous_response_id=one.id)
            await client.responses.create(model="any", input="b", previous_response_id=one.id, instructions="Be long.")
        turns = (await session.view())["turns"]
        assert [turn["parent_id"] for turn in turns] == [None, turns[0]["turn_id"], None]
        assert [m["content"] for m in turns[2]["messages"]] == ["Be long.", "a", SAID, "b", SAID]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input_ids": [1]}, "input_ids"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_named(rig_of, spelling, change, param):
    async with speaking(rig_of, spelling, SAID) as (rig, _engine):
        session = await rig.open()
        error = await session.call("POST", "/v1/responses", {"model": "any", "input": "a", **change}, status=400)
        assert error["error"]["param"] == param
        assert (await session.view())["turns"] == []


async def test_a_conversation_begun_in_chat_goes_on_in_responses(rig_of, spelling):
    async with speaking(rig_of, spelling, CALL, SAID, "Bye.") as (rig, _engine):
        session = await rig.open()
        history = await chat_conversation(session, stream=False)
        call = history[2]["tool_calls"][0]
        items = [
            {"role": "user", "content": ASK}, {"role": "assistant", "content": history[2]["content"]},
            {
                "type": "function_call", "call_id": call["id"], "name": "weather",
                "arguments": call["function"]["arguments"],
            },
            {"type": "function_call_output", "call_id": call["id"], "output": TOOL_RESULT},
            {"role": "assistant", "content": SAID}, {"role": "user", "content": "Thanks!"},
        ]  # fmt: skip
        async with client_of(session) as client:
            answer = await client.responses.create(model="any", input=items, instructions="Be brief.", tools=[TOOL])
        assert answer.output_text == "Bye."
        assert len(await token_ids(session)) > 0
        assert chat_tool("weather")["function"]["name"] == TOOL["name"]
