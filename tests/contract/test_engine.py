"""What segue relies on in an engine; the same assertions for the fake and for SGLang on a CPU."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines_under_test import START_VERSION, VOCAB, Engine

from actors.engines.fake import weights
from actors.engines.http import EngineControl
from segue.errors import EngineError
from segue.wire.engine import GenerateAnswer, GenerateRequest, SamplingParams

pytestmark = pytest.mark.timeout(300)

PROMPT = (3, 14, 15, 9, 26, 5)
LONG = 300
"""Tokens of a request that is still running when a test interferes with it."""


def ask(
    n: int = 12, prompt: tuple[int, ...] = PROMPT, *, start: int = 0, stream: bool = False, rid: str | None = None
) -> GenerateRequest:
    """A greedy request for exactly n tokens, with log-probs and routes."""
    return GenerateRequest(
        rid=rid or uuid.uuid4().hex,
        input_ids=list(prompt),
        sampling_params=SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True),
        return_logprob=True,
        return_routed_experts=True,
        routed_experts_start_len=start,
        stream=stream,
    )


async def until_running(engine: Engine) -> None:
    """Long enough for a request to be past its prefill, short enough for LONG tokens not to be done."""
    await asyncio.sleep(0.3)


def rows_of(answer: GenerateAnswer) -> np.ndarray:
    assert answer.rows is not None
    return answer.rows


# --- generating -----------------------------------------------------------------------------------------------------


async def test_answer_has_tokens_logprobs_rows_and_version(engine: Engine) -> None:
    answer = await engine.generate(ask(12))
    assert answer.finish.type == "length"
    assert len(answer.output_ids) == 12
    assert all(0 <= token < VOCAB for token in answer.output_ids)
    assert answer.logprobs is not None
    assert answer.logprobs.shape == (12,)
    assert (answer.logprobs <= 0).all()
    assert rows_of(answer).shape == (len(PROMPT) + 12 - 1, 4, 2)
    assert rows_of(answer).min() >= 0
    assert rows_of(answer).max() < 8
    assert (rows_of(answer)[..., 0] != rows_of(answer)[..., 1]).all()
    assert answer.spans == ((0, 12, START_VERSION),)


async def test_greedy_answers_repeat(engine: Engine) -> None:
    first, second = await engine.generate(ask(20)), await engine.generate(ask(20))
    assert first.output_ids == second.output_ids
    assert np.array_equal(rows_of(first), rows_of(second))


@pytest.mark.parametrize("start", [1, len(PROMPT) - 1, len(PROMPT)])
async def test_rows_from_a_start_are_the_tail_of_all_rows(engine: Engine, start: int) -> None:
    whole, tail = await engine.generate(ask(8)), await engine.generate(ask(8, start=start))
    assert np.array_equal(rows_of(tail), rows_of(whole)[start:])


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: Engine) -> None:
    target = (await engine.generate(ask(12))).output_ids[4]
    request = GenerateRequest(
        rid=uuid.uuid4().hex,
        input_ids=list(PROMPT),
        sampling_params=SamplingParams(max_new_tokens=12, temperature=0.0, stop_token_ids=(target,)),
    )
    answer = await engine.generate(request)
    assert (answer.finish.type, answer.finish.matched) == ("stop", target)
    assert answer.output_ids[-1] == target
    assert answer.completion_tokens <= 5


async def test_ignoring_eos_ignores_stop_tokens_too(engine: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, stop_token_ids=tuple(range(VOCAB)))
    request = GenerateRequest(rid=uuid.uuid4().hex, input_ids=list(PROMPT), sampling_params=sampling)
    assert len((await engine.generate(request)).output_ids) == 6


async def test_streamed_chunks_grow_into_the_whole_answer(engine: Engine) -> None:
    whole = await engine.generate(ask(10))
    chunks = [chunk async for chunk in engine.stream(ask(10, stream=True))]
    assert len(chunks) > 1
    for before, after in itertools.pairwise(chunks):
        assert after.output_ids[: len(before.output_ids)] == before.output_ids
    assert [chunk.finish.type for chunk in chunks[:-1]] == ["unfinished"] * (len(chunks) - 1)
    assert all(chunk.rows is None for chunk in chunks[:-1])
    assert chunks[-1].output_ids == whole.output_ids
    assert np.array_equal(rows_of(chunks[-1]), rows_of(whole))


async def test_closing_a_stream_aborts_the_request(engine: Engine) -> None:
    stream = engine.stream(ask(LONG * 8, stream=True))
    async for _ in stream:
        break
    await stream.aclose()
    await engine.control.flush(timeout_s=10)  # fails as long as something runs


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (ask(12, start=len(PROMPT) + 1), "routed_experts_start_len"),
        (ask(12, prompt=tuple([7] * 4200)), "4096"),
    ],
    ids=["start beyond the prompt", "longer than the context"],
)
async def test_a_wrong_request_is_refused_with_the_reason(engine: Engine, request_: GenerateRequest, word: str) -> None:
    with pytest.raises(EngineError, match=word):
        await engine.generate(request_)
    assert len((await engine.generate(ask(2))).output_ids) == 2


# --- aborting and carrying on ---------------------------------------------------------------------------------------


async def test_abort_by_id_returns_the_partial_with_its_rows(engine: Engine) -> None:
    request = ask(LONG)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(request))
        await until_running(engine)
        await engine.control.abort(request.rid)
    partial = running.result()
    assert partial.finish.type == "abort"
    assert 0 < len(partial.output_ids) < LONG
    assert len(rows_of(partial)) == len(PROMPT) + len(partial.output_ids) - 1


async def test_an_abort_reaches_ids_that_begin_with_it(engine: Engine) -> None:
    rid = uuid.uuid4().hex
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(ask(LONG, rid=each))) for each in (rid, rid + "-2")]
        await until_running(engine)
        await engine.control.abort(rid)
    assert [task.result().finish.type for task in tasks] == ["abort", "abort"]


async def test_aborting_an_unknown_id_does_nothing(engine: Engine) -> None:
    await engine.control.abort(uuid.uuid4().hex)
    assert len((await engine.generate(ask(2))).output_ids) == 2


async def test_a_partial_carried_on_equals_the_uninterrupted_answer(engine: Engine) -> None:
    whole = await engine.generate(ask(LONG))
    await engine.control.flush()
    request = ask(LONG)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(request))
        await until_running(engine)
        await engine.control.abort(request.rid)
    partial = running.result()
    done = len(partial.output_ids)
    known = len(rows_of(partial))
    rest = await engine.generate(ask(LONG - done, (*PROMPT, *partial.output_ids), start=known))
    assert partial.output_ids + rest.output_ids == whole.output_ids
    assert np.array_equal(np.concatenate([rows_of(partial), rows_of(rest)]), rows_of(whole))


# --- pausing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_after_resume(engine: Engine, mode: str) -> None:
    whole = await engine.generate(ask(LONG))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(ask(LONG)))
        await until_running(engine)
        await engine.control.pause(mode)  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        assert not running.done()
        await engine.control.resume()
    assert running.result().output_ids == whole.output_ids
    assert (running.result().num_retractions > 0) == (mode == "retract")


async def test_pause_abort_returns_every_partial(engine: Engine) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(ask(LONG, (i, *PROMPT)))) for i in range(3)]
        await until_running(engine)
        await engine.control.pause("abort")
    assert [task.result().finish.type for task in tasks] == ["abort"] * 3


async def test_a_request_sent_to_a_paused_engine_waits_for_resume(engine: Engine) -> None:
    await engine.control.pause("retract")
    async with asyncio.TaskGroup() as group:
        held = group.create_task(engine.generate(ask(4)))
        await asyncio.sleep(0.5)
        assert not held.done()
        await engine.control.resume()
    assert len(held.result().output_ids) == 4


async def test_an_abort_of_a_retracted_request_returns_no_rows_and_perhaps_fewer_tokens(engine: Engine) -> None:
    whole = await engine.generate(ask(LONG))
    request = ask(LONG)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(request))
        await until_running(engine)
        await engine.control.pause("retract")
        await engine.http.post(engine.control.url + "/abort_request", json={"rid": request.rid})
    cut = running.result()
    assert cut.finish.type == "abort"
    assert cut.output_ids == whole.output_ids[: len(cut.output_ids)]
    assert len(cut.output_ids) % 50 == 0  # what the scheduler had handed on when it was asked
    assert cut.rows is None


async def test_control_refuses_what_a_paused_engine_would_lose(engine: Engine) -> None:
    await engine.control.pause("in_place")
    with pytest.raises(EngineError, match=r"abort refused.*in_place"):
        await engine.control.abort(uuid.uuid4().hex)
    with pytest.raises(EngineError, match=r"pause\(retract\) refused"):
        await engine.control.pause("retract")
    with pytest.raises(EngineError, match="flush refused"):
        await engine.control.flush()


async def test_flush_empties_the_prefix_cache_and_fails_while_something_runs(engine: Engine) -> None:
    await engine.generate(ask(4))
    assert (await engine.generate(ask(4))).cached_tokens > 0
    await engine.control.flush()
    assert (await engine.generate(ask(4))).cached_tokens == 0
    request = ask(LONG * 8)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(request))
        await until_running(engine)
        with pytest.raises(EngineError, match="/flush_cache"):
            await engine.control.flush(timeout_s=0)
        await engine.control.abort(request.rid)
    assert running.result().finish.type == "abort"


async def test_cache_name_spaces_do_not_meet(engine: Engine) -> None:
    def with_key(key: str) -> GenerateRequest:
        return GenerateRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(PROMPT),
            sampling_params=SamplingParams(max_new_tokens=2, temperature=0.0),
            extra_key=key,
        )

    await engine.generate(with_key("v1"))
    assert (await engine.generate(with_key("v2"))).cached_tokens == 0
    assert (await engine.generate(with_key("v1"))).cached_tokens > 0


# --- memory ---------------------------------------------------------------------------------------------------------


async def test_release_and_onload_are_idempotent_and_the_engine_lives(engine: Engine) -> None:
    control = engine.control
    with pytest.raises(EngineError, match="must be paused"):
        await control.release(["kv_cache"])
    await control.pause("retract")
    assert await control.release(["kv_cache", "cuda_graph"]) == ("kv_cache", "cuda_graph")
    assert await control.release(["kv_cache"]) == ()
    with pytest.raises(EngineError, match=r"resume refused.*cuda_graph, kv_cache"):
        await control.resume()
    assert await control.onload(["weights", "kv_cache", "cuda_graph"]) == ("kv_cache", "cuda_graph")
    assert await control.onload(["kv_cache"]) == ()
    await control.resume()
    assert len((await engine.generate(ask(3))).output_ids) == 3


async def test_release_with_retracted_requests_leaves_them_to_go_on(engine: Engine) -> None:
    whole = await engine.generate(ask(LONG))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(ask(LONG)))
        await until_running(engine)
        await engine.control.pause("retract")
        await engine.control.release(["kv_cache"])
        await engine.control.onload(["kv_cache"])
        await engine.control.resume()
    assert running.result().output_ids == whole.output_ids


async def test_an_unknown_tag_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="no tags"):
        await engine.control.onload(["weight"])


# --- weights --------------------------------------------------------------------------------------------------------


def pickled(folder: Path) -> bytes:
    from safetensors.torch import load_file

    return pickle.dumps(list(load_file(folder / "model.safetensors").items()))


async def load_by_tensor(control: EngineControl, folder: Path, version: int, flush_cache: bool = True) -> None:
    await control.begin()
    await control.load_tensors(pickled(folder), load_format=None, version=version, flush_cache=flush_cache)
    await control.end()


async def load_by_disk(control: EngineControl, folder: Path, version: int, flush_cache: bool = True) -> None:
    await control.begin()
    await control.load_disk(str(folder), version=version, flush_cache=flush_cache)
    await control.end()


@pytest.mark.parametrize("load", [load_by_tensor, load_by_disk])
async def test_loaded_weights_show_in_version_checksums_and_answers(
    engine: Engine, tiny_moe: Path, other_moe: Path, load: Callable[..., object]
) -> None:
    control, before = engine.control, await engine.generate(ask(12))
    original = await control.checksums()
    await control.pause("retract")
    await load(control, other_moe, 6)  # type: ignore[misc]
    await control.resume()
    after = await engine.generate(ask(12))
    assert (await control.info()).weight_version == 6
    assert after.spans == ((0, 12, 6),)
    assert not np.array_equal(rows_of(after), rows_of(before))
    assert await control.checksums() != original
    await load(control, tiny_moe, 7)  # type: ignore[misc]
    assert await control.checksums() == original


async def test_checksums_are_those_of_the_folder_that_was_loaded(engine: Engine, other_moe: Path) -> None:
    await load_by_disk(engine.control, other_moe, 6)
    assert await engine.control.checksums() == weights.checksums(weights.from_folder(other_moe))


async def test_set_version_renames_without_cutting_what_runs(engine: Engine) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(ask(LONG)))
        await until_running(engine)
        await engine.control.set_version(9)
    assert running.result().finish.type == "length"
    assert (await engine.control.info()).weight_version == 9


@pytest.mark.parametrize(("mode", "flush_cache"), [("in_place", False), ("retract", True)])
async def test_a_request_across_an_update_names_both_versions(
    engine: Engine, other_moe: Path, mode: str, flush_cache: bool
) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.generate(ask(LONG)))
        await until_running(engine)
        await engine.control.pause(mode)  # type: ignore[arg-type]
        await load_by_disk(engine.control, other_moe, 6, flush_cache)
        await engine.control.resume()
    answer = running.result()
    assert [version for _, _, version in answer.spans] == [START_VERSION, 6]
    assert 0 < answer.spans[0][1] < LONG
    assert len(rows_of(answer)) == len(PROMPT) + LONG - 1


async def test_what_was_fed_keeps_its_rows_in_place_and_changes_them_when_fed_again(
    engine: Engine, other_moe: Path
) -> None:
    whole = await engine.generate(ask(LONG))
    for mode, flush_cache in (("in_place", False), ("retract", True)):
        await engine.control.flush()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.generate(ask(LONG)))
            await until_running(engine)
            await engine.control.pause(mode)  # type: ignore[arg-type]
            await load_by_disk(engine.control, other_moe, 6, flush_cache)
            await engine.control.resume()
        answer = running.result()
        fed = len(PROMPT) + answer.spans[0][1] - 1
        kept = np.array_equal(rows_of(answer)[:fed], rows_of(whole)[:fed])
        assert kept == (mode == "in_place"), mode
        await engine.control.pause("retract")
        await load_by_disk(engine.control, Path((await engine.control.info()).model_path), START_VERSION)
        await engine.control.resume()


async def test_weight_sessions_are_strict(engine: Engine) -> None:
    control = engine.control
    with pytest.raises(EngineError, match=f"engine {engine.kind} /update_weights_from_tensor.*begin_weight_update"):
        await control.load_tensors(b"never read", load_format=None, version=6, flush_cache=True)
    with pytest.raises(EngineError, match="no weight-update session"):
        await control.end()
    await control.begin()
    with pytest.raises(EngineError, match="already open"):
        await control.begin()
    await control.end()
    assert (await control.info()).weight_version == START_VERSION


async def test_in_place_refuses_to_flush_before_anything_is_loaded(engine: Engine, other_moe: Path) -> None:
    original = await engine.control.checksums()
    await engine.control.pause("in_place")
    with pytest.raises(EngineError, match="in_place pause cannot flush"):
        await engine.control.load_disk(str(other_moe), version=6, flush_cache=True)
    assert await engine.control.checksums() == original


async def test_a_folder_without_weights_is_refused(engine: Engine, tmp_path: Path) -> None:
    original = await engine.control.checksums()
    with pytest.raises(EngineError, match="/update_weights_from_disk"):
        await engine.control.load_disk(str(tmp_path), version=6, flush_cache=True)
    assert await engine.control.checksums() == original
    assert len((await engine.generate(ask(3))).output_ids) == 3
