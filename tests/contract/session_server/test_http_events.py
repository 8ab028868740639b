"""The view and the event stream of a session: committed facts only, each once, in order."""

from __future__ import annotations

import asyncio
import json

import pytest

from segue.log import MemoryLog
from session_server import feed


async def told(rig, session, *, after=None, follow=False, until=None):
    """(id, type, body) of the session's events, up to the first of type `until`."""
    query = f"/events?follow={'true' if follow else 'false'}"
    head = {"Authorization": f"Bearer {session.opened['token']}"}
    if after is not None:
        head["Last-Event-ID"] = str(after)
    found, event = [], {}
    async with rig.http.get(rig.url + session.path + query, headers=head) as answer:
        assert answer.status == 200, await answer.read()
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                event[name] = value
            elif "id" in event:
                data = json.loads(event["data"])
                assert (int(event["id"]), event["event"]) == (data["position"], data["type"])
                found.append((data["position"], data["type"], data["body"]))
                event = {}
                if found[-1][1] == until:
                    break
    return found


async def test_events_are_the_sessions_facts_in_order(rig_of, engine):
    async with rig_of(engine) as rig:
        session, other = await rig.open(), await rig.open()
        await session.chat("w1", max_tokens=3)
        await other.chat("w1", max_tokens=3)
        await session.call("POST", "/reward", {"value": 1.0})
        events = await told(rig, session)
        assert [kind for _, kind, _ in events] == [
            "session.opened", "turn.started", "turn.committed", "sample.reward_recorded"
        ]  # fmt: skip
        assert {body["session_id"] for _, _, body in events} == {session.opened["session_id"]}
        positions = [position for position, _, _ in events]
        assert positions == sorted(positions)
        assert await told(rig, session, after=positions[1]) == events[2:]
        assert await told(rig, session, after=positions[-1]) == []


async def test_a_listener_hears_of_everything_up_to_the_end(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        listener = asyncio.create_task(told(rig, session, follow=True))
        await session.chat("w1", max_tokens=10)
        await session.finish(reward=1.0)
        events = await listener
        assert [kind for _, kind, _ in events][-2:] == ["session.finished", "sample.ready"]
        assert len({position for position, _, _ in events}) == len(events) == 6


async def test_events_before_a_restart_are_told_after_it(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await session.chat("w1", max_tokens=3)
        before = await told(rig, session)
        await rig.stop()
        await rig.start()
        assert await told(rig, session) == before


async def test_a_listener_that_is_too_slow_is_let_go(rig_of, engine, monkeypatch):
    monkeypatch.setattr(feed, "MAX_BEHIND", 3)
    log = MemoryLog("run")
    async with rig_of(engine) as rig:
        session = await rig.open()
        told_to = feed.Feed(rig.log, log, await rig.log.tail())  # type: ignore[arg-type]
        listening = told_to.listen(session.opened["session_id"], told_to.position)
        assert await anext(listening) is None
        for number in range(3):
            await session.call("POST", "/reward", {"value": 1.0, "key": str(number)})
        await session.chat("w1", max_tokens=2)
        for event in await rig.log.read(told_to.position):
            told_to.tell(event)
        rest = [event async for event in listening]
        assert len(rest) <= 4
        assert told_to._listeners == {}


async def test_the_view_shows_only_what_is_committed(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        turn = asyncio.create_task(session.chat("w1", max_tokens=30))
        await rig.until("turn.started")
        await asyncio.sleep(0.05)
        assert (await session.view())["turns"] == []
        await turn
        assert len((await session.view())["turns"]) == 1


async def test_a_reward_shows_once_it_stands_in_the_log(rig_of, engine, monkeypatch):
    async with rig_of(engine) as rig:
        session = await rig.open()
        hold, append = asyncio.Event(), MemoryLog.append

        async def slow(self, batch):
            await hold.wait()
            return await append(self, batch)

        monkeypatch.setattr(MemoryLog, "append", slow)
        given = asyncio.create_task(session.call("POST", "/reward", {"value": 1.0}))
        await asyncio.sleep(0.1)
        assert (await session.view())["rewards"] == []
        hold.set()
        await given
        assert [r["value"] for r in (await session.view())["rewards"]] == [1.0]


@pytest.mark.parametrize("query", ["after=x", "after=-1", "follow=maybe", f"after={'9' * 100}"])
async def test_a_malformed_question_is_400(rig_of, engine, query):
    async with rig_of(engine) as rig:
        session = await rig.open()
        error = await session.call("GET", f"/events?{query}", status=400)
        assert error["error"]["param"] == query.split("=")[0]
