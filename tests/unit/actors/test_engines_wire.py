"""Requests encode with defaults left out; answers decode only if they do not contradict themselves."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from segue.errors import EngineError, EngineUnavailable
from segue.wire.engine import (
    STREAM_END,
    EventSplitter,
    GenerateRequest,
    RouteShape,
    SamplingParams,
    check_vocabulary,
    decode_answer,
    encode_abort,
    encode_request,
    error_of,
)

ROUTES = RouteShape(layers=3, top_k=2)
REQUEST = GenerateRequest(
    rid="r" * 32,
    input_ids=[5, 6, 7, 8],
    sampling_params=SamplingParams(max_new_tokens=2, temperature=0.7),
    return_logprob=True,
    return_routed_experts=True,
    routed_experts_start_len=1,
)
ROWS = np.arange(4 * 3 * 2, dtype="<i4").reshape(4, 3, 2)


def answer(output_ids: tuple[int, ...] = (11, 12), **changes: Any) -> bytes:
    """The answer to REQUEST; a change of None removes the field."""
    meta: dict[str, Any] = {
        "id": REQUEST.rid,
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 4,
        "completion_tokens": len(output_ids),
        "cached_tokens": 3,
        "weight_version": "8",
        "weight_versions": [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}],
        "num_retractions": 0,
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None]],
        "routed_experts": base64.b64encode(ROWS.tobytes()).decode(),
        "some_new_field": 1,
    } | changes
    meta = {key: value for key, value in meta.items() if value is not None or key == "finish_reason"}
    return orjson.dumps({"text": "ab", "output_ids": list(output_ids), "meta_info": meta})


def test_defaults_are_left_out_of_a_request() -> None:
    body = orjson.loads(encode_request(REQUEST))
    assert body == {
        "rid": "r" * 32,
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 2, "temperature": 0.7},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 1,
    }


def test_a_whole_answer_decodes() -> None:
    decoded = decode_answer(answer(), REQUEST, routes=ROUTES)
    assert decoded.output_ids == [11, 12]
    assert decoded.logprobs is not None
    assert decoded.logprobs.dtype == np.float32
    assert decoded.logprobs.tolist() == [-0.5, -1.5]
    assert decoded.spans == ((0, 1, 7), (1, 2, 8))
    assert decoded.rows is not None
    assert np.array_equal(decoded.rows, ROWS)
    assert (decoded.finish.type, decoded.prompt_tokens, decoded.cached_tokens) == ("length", 4, 3)


def test_an_engine_without_spans_gives_one() -> None:
    decoded = decode_answer(answer(weight_versions=None), REQUEST, routes=ROUTES)
    assert decoded.spans == ((0, 2, 8),)
    decoded = decode_answer(
        answer(weight_versions=None, weight_version="default"), REQUEST, routes=ROUTES, default_version=3
    )
    assert decoded.spans == ((0, 2, 3),)


def test_an_answer_aborted_in_the_queue_lacks_rows_and_counts() -> None:
    body = answer(
        finish_reason={"type": "abort", "message": "Abort in waiting queue"},
        **dict.fromkeys(("prompt_tokens", "cached_tokens", "num_retractions", "routed_experts")),
    )
    decoded = decode_answer(body, REQUEST, routes=ROUTES)
    assert (decoded.rows, decoded.prompt_tokens) == (None, 4)
    assert decoded.finish.message == "Abort in waiting queue"


def test_an_unfinished_chunk_has_no_rows_yet() -> None:
    decoded = decode_answer(answer(finish_reason=None, routed_experts=None), REQUEST, routes=ROUTES)
    assert (decoded.finish.type, decoded.rows) == ("unfinished", None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "x"}, "got an answer for x"),
        ({"completion_tokens": 3}, "2 output ids, completion_tokens 3"),
        ({"prompt_tokens": 5}, "prompt of 4 tokens counted as 5"),
        ({"output_token_logprobs": [[-0.5, 11, None]]}, "2 output ids, 1 log-probs"),
        ({"output_token_logprobs": [[-0.5, 11, None], [-1.0, 13, None]]}, "other tokens"),
        ({"output_token_logprobs": [[-0.5, 11, None], [None, 12, None]]}, "output token 1 is None"),
        ({"output_token_logprobs": None}, "0 log-probs"),
        ({"routed_experts": None}, "routed experts were asked for and are missing"),
        (
            {"routed_experts": base64.b64encode(ROWS[:3].tobytes()).decode()},
            "3 route rows, expected 4 .* row 4 is missing",
        ),
        ({"routed_experts": base64.b64encode(bytes(20)).decode()}, "5 experts are no whole route rows of 3 x 2"),
        ({"routed_experts": "AAA"}, "route rows do not decode"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 1}]}, "do not cover 2"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 2}]}, "'a' is not a decimal"),
        ({"finish_reason": {"type": "tired"}}, "finish_reason"),
    ],
)
def test_a_contradiction_is_an_error_that_says_which(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        decode_answer(answer(**changes), REQUEST, routes=ROUTES)


def test_rows_without_a_known_shape_are_an_error() -> None:
    with pytest.raises(EngineError, match="route shape is not known"):
        decode_answer(answer(), REQUEST)


def test_an_error_inside_a_stream_is_an_error() -> None:
    with pytest.raises(EngineError, match="too long"):
        decode_answer(b'{"error":{"message":"too long"}}', REQUEST)
    with pytest.raises(EngineError, match="does not decode"):
        decode_answer(b"[]", REQUEST)


def test_kept_sets_become_sorted_rows_and_hold_their_token() -> None:
    request = GenerateRequest(
        rid=REQUEST.rid, input_ids=[5, 6, 7, 8], sampling_params=REQUEST.sampling_params, return_sampling_mask=True
    )
    lists = {"output_token_sampling_mask": [[30, 11, 2], [12]], "output_token_sampling_logprobs": [-0.1, 0.0]}
    decoded = decode_answer(answer(**lists), msgspec.structs.replace(request, return_logprob=True))
    mask = decoded.mask
    assert mask is not None
    assert (mask.ids.tolist(), mask.offsets.tolist()) == ([2, 11, 30, 12], [0, 3, 4])
    assert decoded.logprobs is not None
    assert np.allclose(decoded.logprobs, [-0.1, 0.0])  # the sampler's, not those of the full vocabulary
    with pytest.raises(EngineError, match=r"token 1 \(12\) is not in the set it was chosen from"):
        decode_answer(answer(**lists | {"output_token_sampling_mask": [[11], [13]]}), request)
    for wrong in ([[11], []], [[11, 11], [12]]):
        with pytest.raises(EngineError, match="sampling mask: "):
            decode_answer(answer(**lists | {"output_token_sampling_mask": wrong}), request)
    with pytest.raises(EngineError, match="the sampling mask was asked for and is missing"):
        decode_answer(answer(), request)
    aborted = decode_answer(answer(finish_reason={"type": "abort", "message": "Abort in waiting queue"}), request)
    assert aborted.mask is None
    with pytest.raises(EngineError, match="mask was asked for and is missing"):
        decode_answer(answer(), request)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_come_out_whole_however_the_stream_is_cut(size: int) -> None:
    events = [b'{"a":1}', b'{"b":"' + b"x" * 300 + b'"}', STREAM_END]
    stream = b"".join(b"data: " + event + b"\n\n" for event in events)
    splitter = EventSplitter()
    assert [e for i in range(0, len(stream), size) for e in splitter.feed(stream[i : i + size])] == events


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"error":{"message":"start is out of range"}}', EngineError, "HTTP 400: start is out of range"),
        (400, b'{"object":"error","message":"no field x"}', EngineError, "no field x"),
        (400, b'{"success":false,"message":"no session"}', EngineError, "no session"),
        (503, b"", EngineUnavailable, "empty body"),
        (500, b"<html>oops</html>", EngineError, "oops"),
    ],
)
def test_http_errors_carry_the_engines_words(status: int, body: bytes, kind: type[EngineError], words: str) -> None:
    error = error_of(status, body, "engine e0 /generate")
    assert type(error) is kind
    assert words in str(error)
    assert "engine e0" in str(error)


def test_ids_outside_the_vocabulary_are_named() -> None:
    check_vocabulary([0, 63], 64)
    with pytest.raises(EngineError, match="token 1 is 64"):
        check_vocabulary([3, 64], 64)
    with pytest.raises(EngineError, match="token 0 is -1"):
        check_vocabulary([-1], 64)


def test_an_abort_needs_an_id_because_an_empty_one_matches_all() -> None:
    assert orjson.loads(encode_abort("abc")) == {"rid": "abc"}
    with pytest.raises(EngineError, match="request id"):
        encode_abort("")


def test_a_full_payload_is_cut_to_the_increment_that_was_asked_for() -> None:
    full = np.concatenate([np.full((1, 3, 2), 9, np.int32), ROWS])
    body = answer(routed_experts=base64.b64encode(full.tobytes()).decode())
    decoded = decode_answer(body, REQUEST, routes=ROUTES)
    assert decoded.rows is not None
    assert np.array_equal(decoded.rows, ROWS)
