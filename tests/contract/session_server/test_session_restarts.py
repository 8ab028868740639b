"""What a session server knows after it died: every committed turn, nothing twice, nothing left half done."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest
from session_server_rig import Client, make_config, text_of, with_r3

from segue.config.schema import Rollout
from segue.events.engine import EngineStarted
from segue.events.sample import RewardRecorded
from segue.events.session import SessionAbandoned, SessionExpired, SessionFinished
from segue.events.turn import TurnStarted
from segue.events.work import RolloutReserved
from segue.log import Writer
from segue.testing.log_fixtures import LogServer


async def test_committed_turns_survive_token_for_token(rig_of, engine, model):
    async with rig_of(engine, config=with_r3(make_config(model))) as rig:
        await rig.admit(1)
        session = await rig.lease()
        one = await session.chat("w1", max_tokens=6)
        await session.call("POST", "/reward", {"value": 0.25, "key": "early", "turn": 0})
        before, frame = await session.view(), await session.call("GET", "/samples")
        await rig.stop()
        await rig.start()
        assert await session.view() == before
        assert await session.call("GET", "/samples") == frame
        two = await session.chat("w1", text_of(one), "w2", max_tokens=6)
        assert two["usage"]["prompt_tokens"] > one["usage"]["total_tokens"]
        turns = (await session.view())["turns"]
        assert turns[1]["parent_id"] == turns[0]["turn_id"]
        assert (await session.finish())["reward"] == 0.25
        await rig.stop()
        await rig.start()
        assert (await session.finish())["sample_id"] == "sample-train-0-0"
        assert (await rig.lease()).opened["rollout_id"] == "train-0-1"


async def test_after_a_restart_an_identical_request_gets_the_old_answer_once(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        first = await session.chat("w1", max_tokens=6)
        await rig.stop()
        await rig.start()
        assert text_of(await session.chat("w1", max_tokens=6)) == text_of(first)
        assert len((await session.view())["turns"]) == 1
        await session.chat("w1", max_tokens=6)
        assert len((await session.view())["turns"]) == 2


async def test_open_requests_are_discarded_and_their_turn_can_be_asked_for_again(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await rig.stop()
        writer = await Writer.open(rig.log, "session-0")
        session_id = session.opened["session_id"]
        for request_id in ("req-1", "req-2"):
            await writer.append(
                TurnStarted(
                    session_id=session_id,
                    turn_id="turn-x",
                    request_id=request_id,
                    engine_id="engine-0",
                    prompt_tokens=3,
                )
            )
        await rig.fact(
            EngineStarted(
                engine_id="engine-0", incarnation="1", url=engine, kind="fake", version=0, checksum="", start_s=0
            )
        )
        await rig.start()
        discarded = await rig.events("turn.discarded")
        assert [(body.request_id, body.reason) for body in discarded] == [
            ("req-1", "server restarted"),
            ("req-2", "server restarted"),
        ]
        await session.chat("w1", max_tokens=3)


@pytest.mark.parametrize("ending", ["finished", "abandoned", "expired"])
async def test_an_ending_that_a_crash_cut_short_is_completed(rig_of, engine, ending):
    async with rig_of(engine) as rig:
        await rig.admit(1, groups=1, size=1)
        session = await rig.lease()
        session_id = session.opened["session_id"]
        await session.chat("w1", max_tokens=3)
        await session.call("POST", "/reward", {"value": 1, "key": "r"})
        await rig.stop()
        writer = await Writer.open(rig.log, "session-0")
        fact = {
            "finished": SessionFinished(session_id=session_id, status="ok"),
            "abandoned": SessionAbandoned(session_id=session_id, reason="x"),
            "expired": SessionExpired(session_id=session_id, reason="x"),
        }[ending]
        await writer.append(fact, expect=(session_id, 2))
        await rig.start()
        names = [body.SPEC.name for body in await rig.events()]
        follows = {
            "finished": ["sample.ready", "work.rollout_received"],
            "abandoned": ["sample.rejected", "work.rollout_returned"],
            "expired": ["work.rollout_returned"],
        }[ending]
        ended = next(i for i, name in enumerate(names) if name.startswith("session.") and name != "session.opened")
        assert names[ended + 1 :] == [*follows, "run.process_started"]
        await rig.stop()
        await rig.start()
        assert [body.SPEC.name for body in await rig.events()] == [*names, "run.process_started"]


async def test_a_reservation_without_its_session_is_returned(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.admit(1, groups=1, size=1)
        await rig.stop()
        writer = await Writer.open(rig.log, "session-0")
        await writer.append(
            RolloutReserved(
                rollout_id="train-0-0", attempt=0, session_id="sess-lost", purpose="train", group=0, member=0, seed=1,
                deadline_wall_s=2e9,
            )
        )  # fmt: skip
        await rig.start()
        assert (await rig.events("work.rollout_returned"))[0].attempt == 0
        assert (await rig.lease()).opened["rollout_id"] == "train-0-0"
        assert (await rig.events("work.rollout_reserved"))[-1].attempt == 1


async def test_a_closed_gate_stays_closed_and_commands_are_not_carried_out_twice(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.admit(1)
        session = await rig.lease()
        await rig.close(1)
        await rig.stop()
        await rig.start()
        turn = asyncio.create_task(session.chat("w1", max_tokens=3))
        await asyncio.sleep(0.1)
        assert await rig.events("turn.started") == []
        await rig.admit(2)
        await turn
        await rig.stop()
        await rig.start()
        assert len(await rig.events("work.admission")) == 3
        assert (await rig.lease()).opened["rollout_id"] == "train-0-1"


async def test_another_owner_of_the_session_ends_this_one(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        session_id = session.opened["session_id"]
        other = await Writer.open(rig.log, "other")
        await other.append(RewardRecorded(session_id=session_id, reward_key="r", value=1.0), expect=(session_id, 0))
        await session.chat("w1", status=503)
        assert await rig.events("turn.committed") == []


@contextlib.asynccontextmanager
async def process(run_dir: Path, http: aiohttp.ClientSession, url: str):
    """`python -m session_server` until killed."""
    command = [sys.executable, "-m", "session_server", "--run-dir", str(run_dir), "--index", "0"]
    child = await asyncio.to_thread(subprocess.Popen, command)
    try:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(url + "/readyz") as answer:
                        if answer.status == 200:
                            break
                assert child.poll() is None
                await asyncio.sleep(0.05)
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
async def test_kill_9_in_mid_turn_and_the_client_just_asks_again(rig_of, slow_engine, model, tmp_path):
    """The real process over the real log server: what was committed stays, what was open is generated anew."""
    config = make_config(model, rollout=Rollout(max_turn_tokens=32, turn_deadline_s=20))
    async with rig_of(slow_engine, config=config) as rig:
        await rig.stop()
        server = LogServer(tmp_path / "server")
        await server.start()
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        endpoints = msgspec.structs.replace(rig.ctx.endpoints, log_url=server.url)
        (run_dir / "config.json").write_bytes(msgspec.json.encode(rig.ctx.config))
        (run_dir / "endpoints.json").write_bytes(msgspec.json.encode(endpoints))
        try:
            async with process(run_dir, rig.http, rig.url) as child:
                session = Client(rig, await rig.call("POST", "/sessions", {}))
                first = await session.chat("w1", max_tokens=5)
                before = await session.view()
                lost = asyncio.create_task(session.chat("w1", text_of(first), "w2", max_tokens=32))
                await asyncio.sleep(0.15)
                child.kill()
                with pytest.raises(aiohttp.ClientError):
                    await lost
            async with process(run_dir, rig.http, rig.url):
                assert (await session.view())["turns"] == before["turns"]
                await session.chat("w1", text_of(first), "w2", max_tokens=32)
                log = await server.open("run")
                events = [event.body for event in await log.read(0, limit=1000)]
                opened = [body.request_id for body in events if body.SPEC.name in ("turn.started", "turn.resumed")]
                closed = {
                    body.request_id
                    for body in events
                    if body.SPEC.name in ("turn.committed", "turn.discarded", "turn.failed", "turn.interrupted")
                }
                assert len(opened) == 3
                assert set(opened) == closed
                assert len((await session.view())["turns"]) == 2
                assert (await session.finish(reward=1))["turns"] == 2
        finally:
            await server.close_logs()
            server.kill()
