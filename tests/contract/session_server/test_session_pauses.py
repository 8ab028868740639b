"""A pause cuts turns; their clients see one complete answer, and the log tells the same story."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.engines.fake.model import FakeModel, model_of
from segue.blobs import BlobStore
from segue.config.schema import Rollout
from segue.events.engine import EngineLost
from segue.events.turn import AbortTurns
from segue.wire.sample import ROW_DECODED, sample_from_frame

SLOW_TURN = 40


def oracle(model: Path) -> FakeModel:
    return model_of(model, eos_p=0.0)


def expected_output(model: FakeModel, prompt: list[int], count: int) -> list[int]:
    """What the fake says when nothing interrupts it."""
    state, output = model.state_of(prompt), []
    for _ in range(count):
        output.append(model.next_token(state))
        state = model.state_of([*prompt, *output])
    return output


@pytest.fixture
def slow_config(model: Path):
    from session_server_rig import make_config, with_r3

    return with_r3(make_config(model, rollout=Rollout(max_turn_tokens=SLOW_TURN, turn_deadline_s=20.0)))


async def paused_turn(rig, session, *, keep_partial: bool = True, pause: int = 1, **body):
    """Start a turn, cut it mid-way, resume its engine; returns the answer."""
    turn = asyncio.create_task(session.chat("w1 w2", max_tokens=SLOW_TURN, **body))
    await rig.until("turn.started", count=pause)
    await asyncio.sleep(0.12)
    await rig.close(pause)
    await rig.command(AbortTurns(pause=pause, keep_partial=keep_partial, drain_s=0.05))
    await rig.until("turn.interrupted" if keep_partial else "turn.discarded", count=pause)
    await asyncio.sleep(0.05)
    assert not turn.done()
    await rig.resume(pause)
    return await turn


async def test_a_cut_turn_is_one_complete_answer_exactly_the_engines(rig_of, slow_engine, slow_config, model, tmp_path):
    async with rig_of(slow_engine, config=slow_config) as rig:
        await rig.admit(1)
        session = await rig.lease()
        answer = await paused_turn(rig, session)
        assert answer["usage"]["completion_tokens"] == SLOW_TURN
        interrupted, resumed = (await rig.events("turn.interrupted"))[0], (await rig.events("turn.resumed"))[0]
        assert 0 < interrupted.kept_tokens == resumed.kept_tokens < SLOW_TURN
        await session.finish(reward=1)
        ready = (await rig.until("sample.ready"))[0]
        assert ready.partial_turns == 1
        sample = sample_from_frame(BlobStore(tmp_path / "blobs").read(ready.frame))
        fake = oracle(model)
        prompt = sample.tokens[sample.loss_mask == 0].tolist()
        output = expected_output(fake, prompt, SLOW_TURN)
        assert sample.tokens.tolist() == prompt + output
        logprobs = [fake.logprob(token, len(prompt) + i, 0) for i, token in enumerate(output)]
        assert sample.logprobs[len(prompt) :].tolist() == pytest.approx(logprobs, rel=1e-6)
        whole = fake.rows(sample.tokens[:-1].tolist(), range(len(sample.tokens) - 1), [0] * (len(sample.tokens) - 1))
        assert np.array_equal(sample.routes, whole)
        assert set(sample.routes_provenance.tolist()) == {ROW_DECODED}


async def test_every_request_has_one_opening_and_one_closing_fact(rig_of, slow_engine, slow_config):
    async with rig_of(slow_engine, config=slow_config) as rig:
        session = await rig.open()
        await paused_turn(rig, session)
        opened = [body.request_id for body in [*await rig.events("turn.started"), *await rig.events("turn.resumed")]]
        closed = [
            body.request_id
            for name in ("turn.committed", "turn.interrupted", "turn.discarded", "turn.failed")
            for body in await rig.events(name)
        ]
        assert sorted(opened) == sorted(closed)
        assert len(set(opened)) == len(opened) == 2


async def test_without_partial_rollouts_a_cut_turn_is_generated_again(rig_of, slow_engine, slow_config, model):
    config = msgspec.structs.replace(slow_config, rollout=msgspec.structs.replace(slow_config.rollout, partial=False))
    async with rig_of(slow_engine, config=config) as rig:
        session = await rig.open()
        answer = await paused_turn(rig, session, keep_partial=False)
        assert answer["usage"]["completion_tokens"] == SLOW_TURN
        dropped = (await rig.events("turn.discarded"))[0].dropped_tokens
        assert 0 < dropped < SLOW_TURN
        assert (await rig.events("turn.committed"))[0].parts == 1
        view = await session.view()
        prompt = view["turns"][0]["prompt_ids"]
        assert view["turns"][0]["output_ids"] == expected_output(oracle(model), prompt, SLOW_TURN)


async def test_no_request_starts_between_the_close_and_the_resume(rig_of, engine):
    async with rig_of(engine) as rig:
        await rig.admit(1)
        session = await rig.lease()
        await rig.close(1)
        held = asyncio.create_task(session.chat("w1", max_tokens=4))
        await asyncio.sleep(0.1)
        await rig.resume(1)
        await asyncio.sleep(0.1)
        assert await rig.events("turn.started") == []  # a new turn waits for the opening
        await rig.call("POST", "/rollouts/lease", {"wait_s": 0}, status=204)
        await rig.admit(2)
        await held
        names = [type(body).__name__ for body in await rig.events()]
        assert names.index("AdmissionClosed") < len(names) - 1 - names[::-1].index("TurnStarted")


async def test_drained_turns_finish_by_themselves(rig_of, slow_engine, slow_config):
    async with rig_of(slow_engine, config=slow_config) as rig:
        session = await rig.open()
        turn = asyncio.create_task(session.chat("w1", max_tokens=10))
        await rig.until("turn.started")
        await rig.close(1)
        await rig.command(AbortTurns(pause=1, keep_partial=False, drain_s=5.0))
        assert (await turn)["usage"]["completion_tokens"] == 10
        assert await rig.events("turn.discarded") == []


async def test_a_turn_held_beyond_its_deadline_is_503_and_the_session_goes_on(rig_of, engine, model):
    from session_server_rig import make_config

    config = make_config(model, rollout=Rollout(max_turn_tokens=8, turn_deadline_s=0.3))
    async with rig_of(engine, config=config) as rig:
        session = await rig.open()
        await rig.close(1)
        error = await session.chat("w1", status=503)
        assert error["error"]["retryable"] is True
        await rig.admit(1)
        await session.chat("w1")


async def test_a_lost_engine_is_replaced_and_the_turn_starts_again(rig_of, engine, slow_engine, model):
    from session_server_rig import fake_engine

    with fake_engine(model, "--token-s", "0.05", "--eos-p", "0") as dying:
        async with rig_of(dying, engine) as rig:
            session = await rig.open()
            turn = asyncio.create_task(session.chat("w1", max_tokens=30))
            await rig.until("turn.started")
            rig.kill_engine(dying)
            await turn
            await rig.fact(EngineLost(engine_id="engine-0", incarnation="1", reason="killed"))
            assert [body.engine_id for body in await rig.events("turn.started")] == ["engine-0", "engine-1"]
            assert (await rig.events("turn.discarded"))[0].reason == "engine unavailable"
            await session.chat("w2", max_tokens=3)
            assert (await rig.events("turn.started"))[-1].engine_id == "engine-1"


async def test_two_pauses_in_one_turn(rig_of, slow_engine, slow_config):
    async with rig_of(slow_engine, config=slow_config) as rig:
        session = await rig.open()
        turn = asyncio.create_task(session.chat("w1", max_tokens=SLOW_TURN))
        for pause in (1, 2):
            await rig.until("turn.started" if pause == 1 else "turn.resumed", count=1)
            await asyncio.sleep(0.08)
            await rig.close(pause)
            await rig.command(AbortTurns(pause=pause, keep_partial=True, drain_s=0))
            await rig.until("turn.interrupted", count=pause)
            await rig.resume(pause)
        assert (await turn)["usage"]["completion_tokens"] == SLOW_TURN
        assert (await rig.events("turn.committed"))[0].parts == 3


async def test_the_kept_tokens_of_a_turn_that_is_given_up_while_held_are_accounted_for(
    rig_of, slow_engine, slow_config
):
    async with rig_of(slow_engine, config=slow_config) as rig:
        session = await rig.open()
        turn = asyncio.create_task(session.chat("w1", max_tokens=SLOW_TURN, status=409))
        await rig.until("turn.started")
        await asyncio.sleep(0.1)
        await rig.close(1)
        await rig.command(AbortTurns(pause=1, keep_partial=True, drain_s=0))
        kept = (await rig.until("turn.interrupted"))[0]
        await session.call("DELETE", "", status=204)
        await turn
        dropped = (await rig.events("turn.discarded"))[0]
        assert (dropped.request_id, dropped.dropped_tokens) == (kept.request_id, kept.kept_tokens)
