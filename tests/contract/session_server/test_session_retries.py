"""Rule 4: which requests are retries, and what they get."""

from __future__ import annotations

import asyncio

import aiohttp
from session_server_rig import text_of


async def lost(session, *contents, wait_s: float, **body) -> None:
    """A turn whose client goes away after `wait_s`."""
    messages = [{"role": "user", "content": content} for content in contents]
    url, head = session.opened["base_url"] + "/chat/completions", {"Authorization": f"Bearer {session.opened['token']}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=wait_s)) as http:
        try:
            await http.post(url, json={"messages": messages, **body}, headers=head)
        except TimeoutError:
            return
    raise AssertionError("the answer came before the client left")


async def turns_of(session) -> int:
    return len((await session.view())["turns"])


async def test_a_lost_answer_is_given_again(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        await lost(session, "w1", wait_s=0.05, max_tokens=20)
        await rig.until("turn.committed")
        again = await session.chat("w1", max_tokens=20)
        assert await turns_of(session) == 1
        assert text_of(again) == (await session.view())["turns"][0]["messages"][-1]["content"]


async def test_a_retry_joins_the_attempt_that_still_runs(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        await lost(session, "w1", wait_s=0.05, max_tokens=25)
        await session.chat("w1", max_tokens=25)
        assert len(await rig.events("turn.started")) == await turns_of(session) == 1


async def test_an_identical_request_after_a_delivered_answer_is_another_sample(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await session.chat("w1", max_tokens=5)
        await session.chat("w1", max_tokens=5)
        assert [turn["parent_id"] for turn in (await session.view())["turns"]] == [None, None]


async def test_a_client_librarys_own_retry_gets_the_committed_turn(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        first = await session.chat("w1", max_tokens=5)
        again = await session.chat("w1", max_tokens=5, headers={"x_stainless_retry_count": "1"})
        assert again == first
        assert await turns_of(session) == 1


async def test_an_idempotency_key_names_one_turn(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        key = {"Idempotency_Key": "k"}
        first = await session.chat("w1", max_tokens=5, headers=key)
        assert await session.chat("w1", max_tokens=5, headers=key) == first
        error = await session.chat("w2", max_tokens=5, headers=key, status=409)
        assert error["error"]["param"] == "Idempotency-Key"


async def test_concurrent_turns_become_siblings_and_none_is_lost(rig_of, slow_engine):
    async with rig_of(slow_engine) as rig:
        session = await rig.open()
        root = await session.chat("w1", max_tokens=2)
        many = await asyncio.gather(*(session.chat("w1", text_of(root), "w2", max_tokens=4) for _ in range(6)))
        turns = (await session.view())["turns"]
        assert len(many) == 6
        assert {turn["parent_id"] for turn in turns[1:]} == {turns[0]["turn_id"]}
        assert len(turns) == 7
