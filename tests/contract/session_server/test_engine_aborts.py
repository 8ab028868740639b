"""What an engine does by itself: an abort that nobody asked for, rows that it forgets."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from session_server_rig import make_config, with_r3

from segue.config.schema import Rollout

LONG = 40


async def test_an_abort_that_nobody_asked_for_is_never_a_finished_turn(rig_of, slow_engine, model):
    config = make_config(model, rollout=Rollout(max_turn_tokens=LONG, turn_deadline_s=20.0))
    async with rig_of(slow_engine, config=config) as rig:
        session = await rig.open()
        turn = asyncio.create_task(session.chat("w1", max_tokens=LONG))
        started = (await rig.until("turn.started"))[0]
        await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as http:
            await http.post(slow_engine + "/abort_request", json={"rid": started.request_id})
        interrupted = (await rig.until("turn.interrupted"))[0]
        assert (await session.view())["turns"] == []
        answer = await turn
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (LONG, "length")
        assert 0 < interrupted.kept_tokens < LONG
        assert [fact.finish_reason for fact in await rig.events("turn.committed")] == ["length"]


async def test_rows_that_were_asked_for_and_are_missing_fail_the_first_answer(rig_of, model):
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop"}, "completion_tokens": 1, "weight_version": "0",
            "prompt_tokens": len(body["input_ids"]), "output_token_logprobs": [[-1.0, 2, None]],
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": [2], "meta_info": meta})

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with rig_of(url, config=with_r3(make_config(model))) as rig:
            session = await rig.open()
            error = await session.chat("w1", status=502)
            assert "routed experts were asked for and are missing" in error["error"]["message"]
            assert (await session.view())["turns"] == []
            assert [fact.status for fact in await rig.events("turn.failed")] == [502]
    finally:
        await runner.cleanup()
