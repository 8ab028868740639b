"""Every pause mode over the real engine, in mid-turn, with a new weight version before the resume: the client sees one
complete answer, and tokens, log-probs, kept sets, route rows and version spans join without a seam."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from session_server_rig import make_config, text_of

from actors.engines.http import EngineControl
from segue.blobs import BlobStore
from segue.config.capabilities import realise
from segue.config.schema import R3, Rollout
from segue.events.turn import AbortTurns
from segue.wire.sample import ROW_RECOMPUTED, Sample, sample_from_frame

LONG = 90
TOP_K = 12
CASES = [
    # mode, partial rollouts, R3, sampling masks
    ("abort", True, True, True),
    ("abort", False, True, False),
    ("abort", True, False, False),
    ("retract", True, True, False),
    ("retract", False, True, True),
    ("retract", True, False, True),
    ("retract_native", True, True, True),
    ("retract_native", False, True, False),
    ("in_place", True, True, False),
    ("in_place", False, True, True),
]
_versions = itertools.count(100)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def config_of(sglang, partial: bool = True, r3: bool = True, masks: bool = False):
    rollout = Rollout(max_turn_tokens=LONG, turn_deadline_s=60.0, partial=partial, top_k=TOP_K if masks else -1)
    return msgspec.structs.replace(make_config(sglang.model, rollout=rollout), r3=R3(enabled=r3))


async def mid_turn(rig, open_session, ask):
    """A session in the middle of a turn: `ask(session)` is played once to know how long it takes, then again (in a
    session of its own each time) until it is found half way; returns session and turn."""
    began_s = time.monotonic()
    await ask(await open_session())
    wait_s = (time.monotonic() - began_s) / 2
    for _ in range(5):
        session, known = await open_session(), len(await rig.events("turn.started"))
        turn = asyncio.create_task(ask(session))
        await rig.until("turn.started", count=known + 1)
        await asyncio.sleep(wait_s)
        if not turn.done():
            return session, turn
        await turn
        wait_s *= 0.6
    raise AssertionError("no turn was found half way")


def long_turn(session):
    return session.chat("w1 w2", max_tokens=LONG)


async def pause(rig, sglang, mode: str, partial: bool, r3: bool, number: int = 1) -> int:
    """What the controller has done at a weight sync; returns the new version."""
    how = realise(mode, partial=partial, r3=r3)
    await rig.close(number)
    if how.cut:
        await rig.command(AbortTurns(pause=number, keep_partial=partial, drain_s=0))
        await rig.until("turn.interrupted" if partial else "turn.discarded", count=number)
    version = next(_versions)
    async with EngineControl(sglang.url, name="engine-0") as control:
        await control.pause(how.engine_pause)
        if how.flush:
            await control.flush()
        await asyncio.to_thread(sglang.set_version, version)
        await control.resume()
    await rig.resume(number)
    return version


async def frame_of(rig, tmp_path: Path) -> Sample:
    ready = (await rig.until("sample.ready"))[-1]
    return sample_from_frame(BlobStore(tmp_path / "blobs").read(ready.frame), with_mask=True)


def check_logprobs(sglang, sample: Sample) -> None:
    """As one request over the final tokens says them; with masks, over what each token was chosen from."""
    table = sglang.logprobs(sample.tokens.tolist())
    for at in np.flatnonzero(sample.loss_mask).tolist():
        expected = table[at, sample.tokens[at]]
        if sample.mask is not None:
            kept = sample.mask.support(at)
            assert sorted(kept) == sorted(np.argsort(-table[at])[:TOP_K])
            expected -= np.logaddexp.reduce(table[at, kept])
        assert sample.logprobs[at] == pytest.approx(expected, abs=1e-3), at


@pytest.mark.parametrize(("mode", "partial", "r3", "masks"), CASES)
async def test_a_paused_turn_is_one_answer_with_every_fact_of_its_tokens(
    rig_of, sglang, tmp_path, mode, partial, r3, masks
):
    before = next(_versions)
    sglang.set_version(before)
    how = realise(mode, partial=partial, r3=r3)
    async with rig_of(sglang.url, config=config_of(sglang, partial, r3, masks)) as rig:
        await rig.admit(1)
        session, turn = await mid_turn(rig, rig.lease, long_turn)
        after = await pause(rig, sglang, mode, partial, r3)
        answer = await turn
        assert answer["usage"]["completion_tokens"] == LONG
        assert answer["choices"][0]["finish_reason"] == "length"
        fact = (await rig.events("turn.committed"))[-1]
        assert fact.parts == (2 if how.open_turns == "carried_on" else 1)
        spans = list(fact.spans)
        if how.open_turns == "regenerated":
            assert spans == [(0, LONG, after)]
        else:
            seam = spans[0][1]
            assert spans == [(0, seam, before), (seam, LONG, after)]
        await session.finish(reward=1.0)
        sample = await frame_of(rig, tmp_path)
        start = len(sample.tokens) - LONG
        assert sample.version_spans.tolist() == [[start + a, start + b, v] for a, b, v in spans]
        assert (sample.mask is not None, sample.routes is not None) == (masks, r3)
        check_logprobs(sglang, sample)
        if not r3:
            return
        flagged = np.zeros(len(sample.tokens) - 1, np.uint8)
        if how.rows == "flagged":
            flagged[: start + spans[0][1]] = ROW_RECOMPUTED  # one turn: all up to where its last span starts
        assert sample.routes_provenance.tolist() == flagged.tolist()
        oracle = sglang.rows(sample.tokens.tolist())
        wrong = np.flatnonzero((np.sort(sample.routes) != np.sort(oracle[: len(sample.routes)])).any(axis=(1, 2)))
        assert wrong.tolist() == []


async def test_a_stream_over_a_cut_is_the_committed_answer(rig_of, sglang):
    async with rig_of(sglang.url, config=config_of(sglang)) as rig:
        body = {
            "messages": [{"role": "user", "content": "w1 w2"}], "stream": True, "max_tokens": LONG
        }  # fmt: skip
        session, stream = await mid_turn(
            rig, rig.open, lambda session: session.call("POST", "/v1/chat/completions", body)
        )
        await pause(rig, sglang, "abort", True, True)
        events = [line[6:] for line in (await stream).decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        choices = [choice for data in events[:-1] for choice in json.loads(data)["choices"]]
        told = "".join(choice["delta"].get("content") or "" for choice in choices)
        turn = (await session.view())["turns"][0]
        assert turn["parts"] == 2
        assert told == turn["messages"][-1]["content"]
        assert choices[-1]["finish_reason"] == "length"


async def test_a_stop_string_over_the_seam_ends_the_turn_where_it_is_complete(rig_of, sglang):
    greedy = {"temperature": 0.0, "max_tokens": LONG}
    async with rig_of(sglang.url, config=config_of(sglang)) as rig:
        whole = await (await rig.open(purpose="eval")).chat("w3 w4", **greedy)
        stop = " ".join(text_of(whole).split(" ")[:-10])  # so long that no pause can miss it
        session, turn = await mid_turn(
            rig, lambda: rig.open(purpose="eval"), lambda s: s.chat("w3 w4", **greedy, stop=stop)
        )
        uncut = (await rig.events("turn.committed"))[-1]
        await pause(rig, sglang, "abort", True, True)
        answer = await turn
        cut = (await session.view())["turns"][0]
        assert cut["parts"] == 2
        assert answer["choices"][0]["finish_reason"] == uncut.finish_reason == "stop"
        assert answer["choices"][0]["message"]["content"] == ""  # all of it is the stop string
        assert len(cut["output_ids"]) == uncut.output_tokens < LONG
        assert [end for _, end, _ in cut["weight_versions"]][-1] == len(cut["output_ids"]) == len(cut["logprobs"])
