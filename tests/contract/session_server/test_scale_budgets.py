"""The memory of all sessions is bounded: rows leave it first, then new sessions wait, then turns of open ones."""

from __future__ import annotations

import asyncio

import msgspec
from session_server_rig import LAYERS, TOP_K, make_config, with_r3

from segue.config.schema import Rollout, SessionServer
from segue.events.base import INLINE_LIMIT_BYTES
from segue.wire.sample import sample_from_frame

PROMPT = 2600
"""Tokens of a first turn whose rows are too many for the log, so that they lie in the blob store."""
assert PROMPT * (LAYERS * TOP_K + 1) > INLINE_LIMIT_BYTES


def limited(model, max_memory_bytes):
    config = with_r3(make_config(model, rollout=Rollout(max_turn_tokens=8, max_session_tokens=4000)))
    return msgspec.structs.replace(config, session_server=SessionServer(max_memory_bytes=max_memory_bytes))


async def gauges(rig):
    await asyncio.sleep(0.6)  # they are set by the sweep
    text = (await rig.call("GET", "/metrics", token="admin")).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in text if line.startswith("segue_session_"))
    return int(float(values["segue_session_held_bytes"])), int(float(values["segue_session_spilled_bytes"]))


async def two_turns(session):
    long = "w1 " * PROMPT
    answer = await session.chat(long, max_tokens=4)
    await session.chat(long, answer["choices"][0]["message"]["content"], "w2", max_tokens=4)


async def frames_of(sessions):
    return [sample_from_frame(await session.call("GET", "/samples")) for session in sessions]


async def test_rows_that_left_memory_come_back_in_the_sample(rig_of, engine, model):
    found = {}
    for limit in (1 << 30, 120_000):
        async with rig_of(engine, config=limited(model, limit)) as rig:
            sessions = [await rig.open() for _ in range(4)]
            for session in sessions:
                await two_turns(session)
            found[limit] = (*await gauges(rig), await frames_of(sessions))
            await sessions[0].call("DELETE", "", status=204)
            held, spilled = await gauges(rig)
            for session in sessions[1:]:
                await session.call("DELETE", "", status=204)
            assert await gauges(rig) == (0, 0), "what ended is given back"
            assert held + spilled < sum(found[limit][:2])
    (whole, none, plain), (held, spilled, thin) = found.values()
    assert none == 0
    assert held <= 120_000
    assert held + spilled == whole
    for one, other in zip(plain, thin, strict=True):
        assert one.routes.tobytes() == other.routes.tobytes()
        assert one.tokens.tolist() == other.tokens.tolist()


async def test_spilled_sessions_survive_a_restart_within_the_limit(rig_of, engine, model):
    async with rig_of(engine, config=limited(model, 120_000)) as rig:
        sessions = [await rig.open() for _ in range(4)]
        for session in sessions:
            await two_turns(session)
        before, frames = await gauges(rig), await frames_of(sessions)
        await rig.stop()
        await rig.start()
        assert (await gauges(rig))[0] <= 120_000
        assert sum(await gauges(rig)) == sum(before)
        again = await frames_of(sessions)
        assert [f.routes.tobytes() for f in again] == [f.routes.tobytes() for f in frames]


async def test_new_sessions_and_then_turns_wait_while_the_limit_is_passed(rig_of, engine, model):
    async with rig_of(engine, config=limited(model, 30_000)) as rig:
        await rig.admit(1)
        one, other = await rig.open(), await rig.open()
        await two_turns(one)
        answer = await one.chat("w1", max_tokens=4)
        assert answer["choices"]
        await other.chat("w1 " * PROMPT, max_tokens=4)
        refused = await rig.call("POST", "/sessions", {}, status=429)
        assert (refused["error"]["type"], refused["error"]["retryable"]) == ("rate_limit_error", True)
        await rig.call("POST", "/rollouts/lease", {}, status=429)
        url = rig.url + other.path + "/v1/chat/completions"
        headers = {"Authorization": f"Bearer {other.opened['token']}"}
        body = {"messages": [{"role": "user", "content": "w2"}]}
        async with rig.http.post(url, json=body, headers=headers) as answered:
            assert (answered.status, answered.headers["Retry-After"]) == (429, "1")
        await one.call("DELETE", "", status=204)
        await other.chat("w2", max_tokens=4)
        await rig.open()
        await rig.lease()


async def test_one_session_may_hold_only_so_much(rig_of, engine, model):
    config = make_config(model)
    small = msgspec.structs.replace(config, session_server=SessionServer(max_session_bytes=1024))
    async with rig_of(engine, config=small) as rig:
        session, other = await rig.open(), await rig.open()
        await session.chat("w1 " * 400, max_tokens=4)
        await session.chat("w2", status=429)
        await other.chat("w2", max_tokens=4)
