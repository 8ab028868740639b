from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import CodecError
from segue.wire.mask import SamplingMask

KEPT = st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=6), max_size=8)


def kept_of(mask: SamplingMask) -> list[list[int]]:
    return [mask.support(token).tolist() for token in range(len(mask))]


def test_kept_sets_are_held_sorted_and_ragged() -> None:
    mask = SamplingMask.of([[9, 2, 5], [4], [7, 1]])
    assert mask.ids.tolist() == [2, 5, 9, 4, 1, 7]
    assert mask.offsets.tolist() == [0, 3, 4, 6]
    assert (mask.ids.dtype, mask.offsets.dtype, len(mask)) == (np.int32, np.int64, 3)


def test_a_mask_is_a_value_of_its_own() -> None:
    ids, offsets = np.array([1, 2], np.int32), np.array([0, 1, 2], np.int64)
    mask = SamplingMask(ids, offsets)
    ids[0] = offsets[1] = 0
    assert kept_of(mask) == [[1], [2]]
    assert (mask.ids.flags.writeable, mask.offsets.flags.writeable) == (False, False)
    assert mask != SamplingMask(np.array([1, 2], np.int32), np.array([0, 1, 2], np.int64))
    assert [mask].count(mask) == 1


@pytest.mark.parametrize(
    ("ids", "offsets", "words"),
    [
        ([1, 2], [0, 1], "offsets must run from 0 to 2"),
        ([1, 2], [1, 2], "offsets must run from 0 to 2"),
        ([], [], "offsets must run from 0 to 0"),
        ([1, 2], [0, 1, 1, 2], "token 1 was chosen from nothing"),
        ([1, 5, 5, 6], [0, 1, 4], "ids of token 1 are not ascending"),
        ([1, 3, 2], [0, 1, 3], "ids of token 1 are not ascending"),
        ([1, -3, 2], [0, 1, 3], "ids of token 1 are not ascending from 0"),
    ],
)
def test_what_is_no_mask_is_refused_with_the_token(ids: list[int], offsets: list[int], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        SamplingMask(np.array(ids, np.int32), np.array(offsets, np.int64))


def test_other_dtypes_are_refused_rather_than_cast() -> None:
    with pytest.raises(CodecError, match=r"ids is int64\[1\], expected int32"):
        SamplingMask(np.array([1]), np.array([0, 1], np.int64))
    with pytest.raises(CodecError, match=r"offsets is int32\[2\], expected int64"):
        SamplingMask(np.array([1], np.int32), np.array([0, 1], np.int32))


@given(KEPT, KEPT, st.data())
def test_cutting_and_joining_give_back_the_same_sets(a: list[set[int]], b: list[set[int]], data: st.DataObject) -> None:
    whole = SamplingMask.join([SamplingMask.of([[*s] for s in a]), SamplingMask.of([[*s] for s in b])])
    sets = [sorted(s) for s in (*a, *b)]
    assert kept_of(whole) == sets
    start = data.draw(st.integers(0, len(sets)))
    end = data.draw(st.integers(start, len(sets)))
    assert kept_of(whole.cut(start, end)) == sets[start:end]
    assert kept_of(SamplingMask.join([whole.cut(0, start), whole.cut(start, len(sets))])) == sets


def test_a_forced_token_is_its_own_only_choice() -> None:
    tokens = np.array([7, 7, 3], np.int32)
    mask = SamplingMask.forced(tokens)
    assert kept_of(mask) == [[7], [7], [3]]
    mask.check(tokens)


def test_the_sampled_token_must_be_in_its_set() -> None:
    mask = SamplingMask.of([[1, 2], [3, 4], [5]])
    mask.check(np.array([2, 3, 5], np.int32))
    SamplingMask.of([]).check(np.zeros(0, np.int32))
    with pytest.raises(CodecError, match=r"token 1 \(5\) is not in the set"):
        mask.check(np.array([2, 5, 5], np.int32))
    with pytest.raises(CodecError, match="mask of 3 tokens for 2"):
        mask.check(np.array([2, 3], np.int32))
    with pytest.raises(CodecError, match="tokens 1 to 4 are not all there"):
        mask.cut(1, 4)
