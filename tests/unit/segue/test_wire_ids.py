"""Ids that are JSON already: the same list, however it was put together."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from segue.wire.engine import GenerateRequest, SamplingParams, encode_request
from segue.wire.ids import EncodedIds, encode_hook


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize(
    "pieces", [[], [[]], [[1]], [[1, 2], [], [3]], [array(), array(7, 8), [9]], [[0], EncodedIds.of([5, 6]), array(1)]]
)
def test_joined_ids_are_the_list_of_all_of_them(pieces: list[object]) -> None:
    whole = [int(i) for piece in pieces for i in piece]  # type: ignore[attr-defined]
    ids = EncodedIds().joined(pieces)  # type: ignore[arg-type]
    assert msgspec.json.decode(ids.json()) == whole
    assert (list(ids), len(ids), ids[:]) == (whole, len(whole), whole)
    assert EncodedIds.of(ids) is ids


def test_a_request_says_the_same_with_ids_encoded_before() -> None:
    def request(ids: object) -> bytes:
        return encode_request(
            GenerateRequest(rid="r", input_ids=ids, sampling_params=SamplingParams(max_new_tokens=1, temperature=1.0))
        )  # type: ignore[arg-type]

    assert request(EncodedIds.of([1, 2, 3])) == request([1, 2, 3])
    assert request(EncodedIds()) == request([])


def test_nothing_else_gets_a_json_form() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        encode_hook(object())
