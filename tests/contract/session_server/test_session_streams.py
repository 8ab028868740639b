"""Streaming: real increments, one answer over pauses, [DONE] only after the commit."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest
from session_server_rig import make_config, text_of

from segue.config.schema import Rollout
from segue.events.turn import AbortTurns


async def read_events(rig, session, body):
    """(seconds since the first event, event) of a streamed turn, and the log's types when each came."""
    url = session.opened["base_url"] + "/chat/completions"
    head = {"Authorization": f"Bearer {session.opened['token']}"}
    found = []
    loop = asyncio.get_running_loop()
    async with rig.http.post(url, json=body, headers=head) as answer:
        assert answer.status == 200, await answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append((loop.time(), line[6:].strip(), len(await rig.events("turn.committed"))))
    return found


def joined(events) -> str:
    chunks = [json.loads(data) for _, data, _ in events if data != b"[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def test_deltas_come_one_by_one_and_add_up_to_the_committed_text(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        body = {"messages": [{"role": "user", "content": "w1"}], "stream": True, "max_tokens": 20}
        body["stream_options"] = {"include_usage": True}
        events = await read_events(rig, session, body)
        assert len(events) > 12
        assert events[-1][0] - events[0][0] > 0.1
        assert joined(events) == (await session.view())["turns"][0]["messages"][-1]["content"]
        assert [count for _, data, count in events if b'"finish_reason":"length"' in data] == [1]
        assert events[5][2] == 0
        assert json.loads(events[-2][1])["usage"]["completion_tokens"] == 20
        assert events[-1][1] == b"[DONE]"


async def test_a_stream_goes_on_over_a_pause(rig_of, slow_engine, model):
    config = make_config(model, rollout=Rollout(max_turn_tokens=40, turn_deadline_s=20))
    async with rig_of(slow_engine, config=config) as rig:
        session = await rig.open()
        body = {"messages": [{"role": "user", "content": "w1"}], "stream": True, "max_tokens": 40}
        reader = asyncio.create_task(read_events(rig, session, body))
        await rig.until("turn.started")
        await asyncio.sleep(0.15)
        await rig.close(1)
        await rig.command(AbortTurns(pause=1, keep_partial=True, drain_s=0))
        await rig.until("turn.interrupted")
        await rig.resume(1)
        events = await reader
        turn = (await session.view())["turns"][0]
        assert (turn["parts"], len(turn["output_ids"])) == (2, 40)
        assert joined(events) == turn["messages"][-1]["content"]


async def test_without_partial_rollouts_nothing_is_shown_before_the_commit(rig_of, slow_engine, model):
    config = make_config(model, rollout=Rollout(max_turn_tokens=20, turn_deadline_s=20, partial=False))
    async with rig_of(slow_engine, config=config) as rig:
        session = await rig.open()
        body = {"messages": [{"role": "user", "content": "w1"}], "stream": True, "max_tokens": 10}
        events = await read_events(rig, session, body)
        assert {count for _, _, count in events} == {1}


async def test_a_stop_string_never_shows_in_deltas(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        first = await rig.open()
        whole = text_of(await first.chat("w5", max_tokens=12))
        stop = whole.split()[6]
        session = await rig.open()
        body = {"messages": [{"role": "user", "content": "w5"}], "stream": True, "max_tokens": 12, "stop": [stop]}
        events = await read_events(rig, session, body)
        assert joined(events) == whole[: whole.index(stop)]
        assert any(b'"finish_reason":"stop"' in data for _, data, _ in events)


async def test_a_broken_stream_is_a_lost_answer(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        url, head = (
            session.opened["base_url"] + "/chat/completions",
            {"Authorization": f"Bearer {session.opened['token']}"},
        )
        body = {"messages": [{"role": "user", "content": "w1"}], "stream": True, "max_tokens": 20}
        async with aiohttp.ClientSession() as other, other.post(url, json=body, headers=head) as answer:
            await answer.content.readline()
        await rig.until("turn.committed")
        events = await read_events(rig, session, body)
        assert len((await session.view())["turns"]) == 1
        assert joined(events) == (await session.view())["turns"][0]["messages"][-1]["content"]


async def test_the_unmodified_openai_client_streams(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        async with openai.AsyncOpenAI(base_url=session.opened["base_url"], api_key=session.opened["token"]) as client:
            messages = [{"role": "user", "content": "w1"}]
            pieces = []
            async for chunk in await client.chat.completions.create(
                model="any", messages=messages, max_tokens=10, stream=True
            ):
                pieces.append(chunk.choices[0])
        assert pieces[-1].finish_reason == "length"
        text = "".join(piece.delta.content or "" for piece in pieces)
        assert text == (await session.view())["turns"][0]["messages"][-1]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_byte_has_its_status(rig_of, engine, stream):
    async with rig_of(engine) as rig:
        session = await rig.open()
        error = await session.chat("w1 " * 5000, stream=stream, status=400)
        assert error["error"]["type"] == "context_length_exceeded"
