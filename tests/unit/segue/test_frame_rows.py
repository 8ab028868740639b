from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import CodecError
from segue.wire.rows import RowLedger, increment, narrow
from segue.wire.sample import ROW_ABSENT, ROW_DECODED, ROW_RECOMPUTED


def made(count: int, first: int = 0, experts: int = 8) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return ((np.arange(count * 6).reshape(count, 2, 3) + first) % experts).astype(np.int32)


@pytest.mark.parametrize(("experts", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)])
def test_rows_are_as_narrow_as_the_experts_allow(experts: int, dtype: type[np.generic]) -> None:
    rows = np.full((2, 2, 3), experts - 1, np.int32)
    assert narrow(rows, experts).dtype == dtype
    np.testing.assert_array_equal(narrow(rows, experts), rows)


def test_an_expert_the_model_does_not_have_is_named_with_its_row() -> None:
    for bad in (8, -1):
        rows = made(4)
        rows[2, 1, 0] = bad
        with pytest.raises(CodecError, match=f"row 2, layer 1: expert {bad} is not one of the model's 8"):
            narrow(rows, 8)
    with pytest.raises(CodecError, match=re.escape("int32[4, 6], expected int32[rows, layers, top_k]")):
        narrow(made(4).reshape(4, 6), 8)
    with pytest.raises(CodecError, match="65537 experts"):
        narrow(made(1), 65537)


def test_an_increment_must_have_exactly_the_rows_asked_for() -> None:
    full = made(9)  # ten tokens
    np.testing.assert_array_equal(increment(full[4:], start=4, tokens=10), full[4:])
    np.testing.assert_array_equal(increment(full, start=4, tokens=10), full[4:])
    assert len(increment(full[:0], start=0, tokens=1)) == 0
    with pytest.raises(
        CodecError, match=r"sent 4 route rows, expected 5 \(from row 4 on, for 10 tokens\): row 8 is missing"
    ):
        increment(full[4:8], start=4, tokens=10)
    with pytest.raises(CodecError, match="row 9 belongs to no fed token"):
        increment(made(6), start=4, tokens=10)


@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_every_slice_of_a_ledger_equals_that_of_the_whole(lengths: list[int], data: st.DataObject) -> None:
    ledger, whole, marks = RowLedger(2, 3, 8), narrow(made(0), 8), np.zeros(0, np.uint8)
    for index, length in enumerate(lengths):
        rows = narrow(made(length, index), 8)
        mark = data.draw(st.sampled_from([ROW_DECODED, ROW_RECOMPUTED, ROW_ABSENT]))
        ledger = ledger.append(ledger.total, rows, mark)
        whole = np.concatenate([whole, rows])
        marks = np.concatenate([marks, np.full(length, mark, np.uint8)])
    assert ledger.total == len(whole)
    end = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, end))
    rows, provenance = ledger.slice(start, end)
    np.testing.assert_array_equal(rows, whole[start:end])
    np.testing.assert_array_equal(provenance, marks[start:end])
    assert rows.dtype == np.uint8


def test_a_gap_and_an_overlap_are_refused_with_their_row() -> None:
    ledger = RowLedger(2, 3, 8).append(0, narrow(made(4), 8))
    with pytest.raises(CodecError, match="route rows 4 to 5 are missing: the next ones start at 6"):
        ledger.append(6, narrow(made(1), 8))
    with pytest.raises(CodecError, match="route row 3 is recorded already"):
        ledger.append(3, narrow(made(1), 8))
    with pytest.raises(CodecError, match="route rows 2 to 5 are not all there: 4 are recorded"):
        ledger.slice(2, 5)


def test_the_count_must_fit_the_committed_tokens() -> None:
    ledger = RowLedger(2, 3, 8)
    assert ledger.known_rows(0) == 0
    assert ledger.known_rows(1) == 0
    ledger = ledger.append(0, narrow(made(4), 8))
    assert ledger.known_rows(5) == 4
    with pytest.raises(CodecError, match="row 4 is missing"):
        ledger.known_rows(6)
    with pytest.raises(CodecError, match="row 3 belongs to no fed token"):
        ledger.known_rows(4)


def test_rows_of_another_model_or_with_a_wrong_provenance_are_refused() -> None:
    ledger = RowLedger(2, 3, 8)
    with pytest.raises(CodecError, match=re.escape("uint16[1, 2, 3], expected uint8[rows, 2, 3]")):
        ledger.append(0, narrow(made(1), 300))
    with pytest.raises(CodecError, match=re.escape("uint8[1, 3, 2]")):
        ledger.append(0, narrow(made(1).reshape(1, 3, 2), 8))
    with pytest.raises(CodecError, match="2 route rows from 0 have the provenance"):
        ledger.append(0, narrow(made(2), 8), np.zeros(1, np.uint8))
    with pytest.raises(CodecError, match="route row 1 has an unknown provenance"):
        ledger.append(0, narrow(made(2), 8), np.array([0, 7], np.uint8))


def test_a_ledger_is_a_value_that_later_changes_do_not_reach() -> None:
    stem = RowLedger(2, 3, 8).append(0, narrow(made(2), 8))
    rows = narrow(made(3, 5), 8)
    left, right = stem.append(2, rows), stem.append_absent(2, 1)
    rows[:] = 0
    assert (stem.total, left.total, right.total) == (2, 5, 3)
    np.testing.assert_array_equal(left.slice(2, 5)[0], made(3, 5))
    assert right.slice(0, 3)[1].tolist() == [ROW_DECODED, ROW_DECODED, ROW_ABSENT]


def test_rows_may_leave_memory_and_come_back() -> None:
    stem = RowLedger(2, 3, 8).append(0, narrow(made(2), 8))
    ledger = stem.append(2, narrow(made(3, 5), 8), ROW_RECOMPUTED)
    assert (ledger.spill(), ledger.held_bytes) == (0, 5 * 7)  # nobody has said where they could be read
    stored, reads = ledger.slice(2, 5), []
    ledger.keep(lambda: reads.append(1) or stored)
    assert (ledger.spill(), ledger.spill(), ledger.held_bytes) == (3 * 7, 0, 2 * 7)
    later = ledger.append(5, narrow(made(1, 1), 8))
    assert (later.total, reads) == (6, [])  # to append needs no row in memory
    np.testing.assert_array_equal(later.slice(1, 6)[0], np.concatenate([made(2)[1:], made(3, 5), made(1, 1)]))
    assert later.slice(1, 6)[1].tolist() == [ROW_DECODED] + 3 * [ROW_RECOMPUTED] + [ROW_DECODED]
    assert len(reads) == 2
    assert stem.slice(0, 2)[0].shape == (2, 2, 3)


def test_rows_that_come_back_changed_are_named() -> None:
    ledger = RowLedger(2, 3, 8).append(0, narrow(made(2), 8))
    ledger.keep(lambda: (narrow(made(1), 8), np.zeros(1, np.uint8)))
    ledger.spill()
    with pytest.raises(CodecError, match=r"route rows 0 to 2 came back as uint8\[1, 2, 3\]"):
        ledger.slice(0, 2)


def test_the_parts_of_a_turn_become_one_link() -> None:
    stem = RowLedger(2, 3, 8).append(0, narrow(made(2), 8))
    parts = stem.append(2, narrow(made(1, 3), 8)).append(3, narrow(made(4, 1), 8), ROW_RECOMPUTED)
    one = parts.joined(2)
    np.testing.assert_array_equal(one.slice(0, 7)[0], parts.slice(0, 7)[0])
    assert one.slice(0, 7)[1].tolist() == parts.slice(0, 7)[1].tolist()
    one.keep(lambda: parts.slice(2, 7))
    assert one.spill() == 5 * 7
    assert stem.joined(2).total == 2


def test_memory_is_that_of_the_compact_rows_and_an_append_costs_what_it_adds() -> None:
    ledger, width = RowLedger(48, 8, 128), 48 * 8
    tracemalloc.start()
    try:
        held = []
        for turn in range(40):
            ledger = ledger.append(ledger.total, np.full((50, 48, 8), turn, np.uint8))
            held.append(ledger)  # as a session's nodes do
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    compact = 40 * 50 * width
    assert compact <= ledger.held_bytes <= 1.01 * compact
    assert used < 1.2 * compact
    assert peak < 1.2 * compact + 3 * 50 * width
