"""Open turns: parts add up to what one uninterrupted request would have given, rows included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.fake.model import FakeModel
from segue.errors import EngineError
from segue.wire.engine import Finish, GenerateAnswer
from segue.wire.mask import SamplingMask
from segue.wire.rows import RowLedger
from segue.wire.sample import ROW_DECODED, ROW_RECOMPUTED
from session_server.partial import Partial

FAKE = FakeModel(eos_p=0.0, layers=2)
PROMPT = [5, 6, 7, 8]


def ledger() -> RowLedger:
    return RowLedger(FAKE.layers, FAKE.top_k, FAKE.experts)


def part(partial: Partial, count: int, *, version: int = 0, rows: bool = True, retractions: int = 0) -> GenerateAnswer:
    """What the fake answers to the next request of this turn, `count` tokens long."""
    context = [*partial.prompt_ids, *partial.output]
    output: list[int] = []
    for _ in range(count):
        output.append(FAKE.next_token(FAKE.state_of([*context, *output])))
    whole = [*context, *output]
    fed = range(partial.rows_start, len(whole) - 1)
    made = FAKE.rows([whole[i] for i in fed], fed, [version] * len(fed))
    logprobs = [FAKE.logprob(t, len(context) + i, version) for i, t in enumerate(output)]
    return GenerateAnswer(
        rid="req", text="", output_ids=output, logprobs=np.array(logprobs, np.float32), finish=Finish("abort"),
        prompt_tokens=len(context), cached_tokens=0, spans=((0, count, version),) if count else (),
        num_retractions=retractions, rows=made if rows else None, mask=None,
    )  # fmt: skip


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_parts_add_up_to_one_request(counts):
    cut, whole = Partial(PROMPT, ledger()), Partial(PROMPT, ledger())
    for count in counts:
        cut.add(part(cut, count))
    if sum(counts) == 0:
        return
    whole.add(part(whole, sum(counts)))
    assert cut.output == whole.output
    assert cut.logprobs().tolist() == whole.logprobs().tolist()
    assert cut.spans == whole.spans
    n = len(PROMPT) + len(cut.output)
    rows, provenance = cut.rows.slice(0, cut.rows.known_rows(n))
    oracle, _ = whole.rows.slice(0, whole.rows.known_rows(n))
    assert np.array_equal(rows, oracle)
    assert set(provenance.tolist()) <= {ROW_DECODED}


def test_rows_that_were_lost_with_a_queued_abort_are_marked_when_made_again():
    partial = Partial(PROMPT, ledger())
    partial.add(part(partial, 3, rows=False))
    partial.add(part(partial, 2, version=1))
    _, provenance = partial.rows.slice(0, partial.rows.total)
    kept = len(PROMPT) + 3 - 1  # the last kept token was never fed before
    assert provenance.tolist() == [ROW_RECOMPUTED] * kept + [ROW_DECODED] * 2
    assert partial.spans == [(0, 3, 0), (3, 5, 1)]


def test_rows_of_a_request_aborted_before_its_first_token_are_its_first():
    partial = Partial(PROMPT, ledger())
    partial.add(part(partial, 0, rows=False))
    partial.add(part(partial, 2))
    _, provenance = partial.rows.slice(0, partial.rows.total)
    assert set(provenance.tolist()) == {ROW_DECODED}


def test_rows_of_a_retracted_request_are_flagged():
    partial = Partial(PROMPT, ledger())
    partial.add(part(partial, 3, retractions=1))
    _, provenance = partial.rows.slice(0, partial.rows.total)
    assert set(provenance.tolist()) == {ROW_RECOMPUTED}


def test_a_wrong_row_count_names_the_row():
    partial = Partial(PROMPT, ledger().append(0, np.zeros((3, 2, 2), np.uint8)))
    answer = part(partial, 2)
    bad = GenerateAnswer(**{n: getattr(answer, n) for n in GenerateAnswer.__slots__} | {"rows": answer.rows + 8})
    with pytest.raises(EngineError, match="route row 0"):
        partial.add(bad)


def test_dropping_and_cutting_leave_consistent_rows():
    partial = Partial(PROMPT, ledger())
    partial.add(part(partial, 5))
    partial.truncate(2)
    assert len(partial.output) == len(partial.logprobs()) == 2
    assert partial.spans == [(0, 2, 0)]
    assert partial.rows.total == len(PROMPT) + 2 - 1
    assert partial.drop() == 2
    assert (partial.output, partial.rows.total, partial.parts) == ([], 0, 0)


def masked(partial: Partial, count: int, *, lost: bool = False) -> GenerateAnswer:
    """The fake's next part with kept sets of three, or with none as after an abort in the engine's queue."""
    answer = part(partial, count, rows=not lost)
    context = [*partial.prompt_ids, *partial.output]
    kept = [FAKE.kept(t, FAKE.state_of([*context, *answer.output_ids[:i]]), 3) for i, t in enumerate(answer.output_ids)]
    return replace(answer, mask=None if lost else SamplingMask.of(kept))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_masks_add_up_and_a_part_that_lost_its_own_counts_as_never_sent(parts):
    cut, whole = Partial(PROMPT, ledger(), masked=True), Partial(PROMPT, ledger(), masked=True)
    kept = sum(count for count, lost in parts if not lost)
    for count, lost in parts:
        answer = masked(cut, count, lost=lost)
        assert len(cut.add(answer).output_ids) == (0 if lost else count)
    whole.add(masked(whole, kept))
    assert cut.output == whole.output
    assert cut.mask().ids.tolist() == whole.mask().ids.tolist()
    assert cut.mask().offsets.tolist() == whole.mask().offsets.tolist()
    assert cut.logprobs().tolist() == whole.logprobs().tolist()
    assert cut.rows.total == (len(PROMPT) + kept - 1 if any(not lost for _, lost in parts) else 0)


def test_cutting_and_dropping_reach_the_mask():
    partial = Partial(PROMPT, None, masked=True)
    partial.add(masked(partial, 5))
    partial.truncate(2)
    partial.mask().check(np.array(partial.output, np.int32))
    partial.drop()
    assert len(partial.mask()) == 0
    assert Partial(PROMPT, None).mask() is None
