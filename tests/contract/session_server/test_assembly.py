"""Assembly over HTTP: branches in one frame, off the loop, changing nothing; what is impossible says why."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
from session_server_rig import broken_engine, make_config, text_of, with_r3

from segue.blobs import BlobStore
from segue.config.schema import Rollout, SessionServer
from segue.wire.rows import RowLedger
from segue.wire.sample import samples_from_bundle
from session_server.selection import delivered_leaves


async def bundle_of(rig, tmp_path: Path):
    ready = (await rig.until("sample.ready"))[0]
    return ready, samples_from_bundle(BlobStore(tmp_path / "blobs").read(ready.frame))


async def branch(session, answers: int = 2) -> None:
    """One turn and `answers` different continuations of it, none of which goes on."""
    first = text_of(await session.chat("w1 w2", max_tokens=5))
    for number in range(answers):
        await session.chat("w1 w2", first, f"w{number + 3}", max_tokens=4 + number)


async def test_all_branches_of_a_rollout_are_one_fact_with_one_reward(rig_of, engine, model, tmp_path):
    async with rig_of(engine, config=with_r3(make_config(model))) as rig:
        await rig.admit(1)
        session = await rig.lease()
        await branch(session, 3)
        answer = await session.finish(reward=0.75)
        ready, samples = await bundle_of(rig, tmp_path)
        assert len(await rig.events("sample.ready")) == 1
        assert len(samples) == 3
        assert {s.reward for s in samples} == {0.75}
        assert {s.rollout_id for s in samples} == {ready.rollout_id}
        facts = await rig.events("turn.committed")
        trained = sum(int(s.loss_mask.sum()) for s in samples)
        assert trained == sum(fact.output_tokens for fact in facts) == ready.trained_tokens == answer["trained_tokens"]
        assert (ready.turns, ready.tokens) == (4, sum(len(s.tokens) for s in samples))
        for sample in samples:
            assert sample.routes.shape[0] == len(sample.tokens) - 1


async def test_samples_can_be_looked_at_any_time_and_change_nothing(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        await branch(session)
        view, events = await session.view(), await rig.events()
        first = await session.call("GET", "/samples")
        assert await session.call("GET", "/samples") == first
        assert (await session.view(), await rig.events()) == (view, events)
        stem = view["turns"][0]["prompt_tokens"] + view["turns"][0]["output_tokens"]
        for length, lengths in ((stem, [stem]), (10_000, [len(s.tokens) for s in samples_from_bundle(first)])):
            cut = samples_from_bundle(await session.call("GET", f"/samples?max_seq_len={length}"))
            assert [len(s.tokens) for s in cut] == lengths
        error = await session.call("GET", "/samples?max_seq_len=3", status=422)
        assert "no turn fits into 3 tokens" in error["error"]["message"]
        await session.call("GET", "/samples?masks=perhaps", status=400)


async def test_a_slow_assembly_does_not_hold_up_other_requests(rig_of, engine, model):
    """A step of somebody else's is in the way of nobody, and neither is a session that goes on meanwhile."""
    entered, leave = threading.Event(), threading.Event()

    def slow(graph):
        entered.set()
        assert leave.wait(10)
        return delivered_leaves(graph)

    module = types.ModuleType("slow_steps")
    module.slow = slow
    sys.modules["slow_steps"] = module
    config = msgspec.structs.replace(
        make_config(model), session_server=SessionServer(select_leaves="slow_steps:slow")
    )  # fmt: skip
    try:
        async with rig_of(engine, config=config) as rig:
            session = await rig.open()
            first = await session.chat("w1", max_tokens=4)
            asked = asyncio.create_task(session.call("GET", "/samples"))
            async with asyncio.timeout(10):
                while not entered.is_set():
                    await asyncio.sleep(0.01)
            began_s = time.monotonic()
            await rig.call("GET", "/healthz")
            await session.chat("w1", text_of(first), "w2", max_tokens=4)
            assert time.monotonic() - began_s < 5
            assert not asked.done()
            leave.set()
            (sample,) = samples_from_bundle(await asked)
            assert sample.turn_index.max() == 0  # the session as it stood when it was asked
            assert len((await session.view())["turns"]) == 2
    finally:
        leave.set()
        del sys.modules["slow_steps"]


async def test_a_client_that_gives_up_on_its_samples_breaks_nothing(rig_of, engine, model, tmp_path):
    """A read error at collection costs that read and no more."""
    async with rig_of(engine) as rig:
        await rig.admit(1)
        session = await rig.lease()
        await session.chat("w1", max_tokens=4)
        head = {"Authorization": f"Bearer {session.opened['token']}"}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.001)) as hasty:
            for _ in range(20):
                with pytest.raises((TimeoutError, aiohttp.ClientError)):
                    await hasty.get(rig.url + session.path + "/samples", headers=head)
        await session.finish(reward=1.0)
        ready, samples = await bundle_of(rig, tmp_path)
        assert ready.trained_tokens == int(samples[0].loss_mask.sum()) > 0


async def test_a_finish_whose_rows_do_not_match_is_a_422_that_names_the_row(rig_of, engine, model, monkeypatch):
    async with rig_of(engine, config=with_r3(make_config(model))) as rig:
        await rig.admit(1)
        session = await rig.lease()
        await session.chat("w1", max_tokens=4)
        whole = RowLedger.slice
        monkeypatch.setattr(RowLedger, "slice", lambda self, start, end: whole(self, start, end + 1))
        error = await session.call("POST", "/finish", {"reward": 1.0}, 422)
        assert "route rows 0 to" in error["error"]["message"]
        rejected = (await rig.until("sample.rejected"))[0]
        assert "route rows 0 to" in rejected.reason


async def test_rows_asked_for_and_wrong_fail_the_turn_that_asked(rig_of, model):
    """Never found out in training: the first answer that lacks a row says which."""
    async with broken_engine() as url, rig_of(url, config=with_r3(make_config(model))) as rig:
        session = await rig.open()
        error = await session.chat("w1", status=502)
        assert "route rows" in error["error"]["message"]
        assert (await session.view())["turns"] == []


async def test_rows_in_the_blob_store_may_leave_memory_and_come_back_at_the_end(rig_of, engine, model, tmp_path):
    config = with_r3(make_config(model, rollout=Rollout(max_turn_tokens=900, max_session_tokens=4000)))
    kept: list[RowLedger] = []
    store = RowLedger.keep

    def keep(self, read) -> None:
        store(self, read)
        kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowLedger, "keep", keep)
        async with rig_of(engine, config=config) as rig:
            await rig.admit(1)
            session = await rig.lease()
            prompt = [5 + i % 50 for i in range(2800)]  # more than lies in an event itself
            await session.call("POST", "/generate", {"input_ids": prompt, "max_new_tokens": 5})
            before = await session.call("GET", "/samples")
            (ledger,) = kept
            width = ledger.layers * ledger.top_k + 1
            assert ledger.held_bytes == ledger.total * width
            assert ledger.spill() == ledger.total * width
            assert ledger.held_bytes == 0
            assert await session.call("GET", "/samples") == before
            await session.finish(reward=1.0)
            _, samples = await bundle_of(rig, tmp_path)
            assert np.array_equal(samples[0].routes, samples_from_bundle(before)[0].routes)
            kept.clear()
            other = await rig.lease()
            await other.call("POST", "/generate", {"input_ids": prompt[::-1], "max_new_tokens": 5})
            kept[0].spill()
            for file in (tmp_path / "blobs").rglob("*"):
                if file.is_file():
                    file.unlink()
            error = await other.call("POST", "/finish", {"reward": 1.0}, 422)
            assert "is missing" in error["error"]["message"]
            assert "is missing" in (await rig.until("sample.rejected"))[0].reason
