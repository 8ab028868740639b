"""Which rollout is leased next, as a fold of everybody's facts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.events.sample import SampleRejected
from segue.events.work import GroupCompleted, OpenAdmission, RolloutReceived, RolloutReserved, RolloutReturned
from session_server.fold import owner_of
from session_server.work import Work, task_seed


def opening(first: int, end: int, size: int = 2, purpose="train") -> OpenAdmission:
    return OpenAdmission(
        admission=1, purpose=purpose, step=1, first_group=first, end_group=end, group_size=size
    )  # fmt: skip


def reserved(work: Work, candidate, session: str = "s") -> None:
    work.apply(
        RolloutReserved(
            rollout_id=candidate.rollout_id, attempt=candidate.attempt, session_id=session, purpose=candidate.purpose,
            group=candidate.group, member=candidate.member, seed=0, deadline_wall_s=0,
        )
    )  # fmt: skip


def take_all(work: Work) -> list[str]:
    found = []
    while (candidate := work.next()) is not None:
        found.append(candidate.rollout_id)
    return found


def test_lowest_group_and_member_first():
    work = Work(2)
    work.open(opening(1, 3))
    assert take_all(work) == ["train-1-0", "train-1-1", "train-2-0", "train-2-1"]


def test_nothing_while_closed_and_old_groups_come_back_with_their_purpose():
    work = Work(2)
    work.open(opening(0, 1))
    first = work.next()
    work.put_back(first)
    work.close()
    assert work.next() is None
    work.open(opening(5, 6, purpose="eval"))
    assert take_all(work) == ["eval-5-0", "eval-5-1"]
    work.open(opening(1, 2))
    assert take_all(work) == ["train-0-0", "train-0-1", "train-1-0", "train-1-1"]


def test_what_another_server_reserved_is_passed_over():
    work, other = Work(2), Work(2)
    for each in (work, other):
        each.open(opening(0, 1))
    reserved(work, other.next())
    assert take_all(work) == ["train-0-1"]


def test_a_returned_rollout_is_leased_again_with_the_next_attempt():
    work = Work(1)
    work.open(opening(0, 1, size=1))
    candidate = work.next()
    reserved(work, candidate)
    work.apply(RolloutReturned(rollout_id="train-0-0", attempt=0, reason="x", final=False))
    again = work.next()
    assert (again.rollout_id, again.attempt) == ("train-0-0", 1)
    assert work.is_final(again.attempt)
    reserved(work, again)
    work.apply(RolloutReturned(rollout_id="train-0-0", attempt=1, reason="x", final=True))
    assert work.next() is None


def test_finished_and_rejected_rollouts_and_settled_groups_are_done():
    work = Work(2)
    work.open(opening(0, 3, size=1))
    for _ in range(2):
        reserved(work, work.next())
    work.apply(RolloutReceived(rollout_id="train-0-0", session_id="s", status="ok"))
    work.apply(SampleRejected(rollout_id="train-1-0", session_id="s", purpose="train", group=1, member=0, reason="x"))
    work.apply(GroupCompleted(purpose="train", group=2, sample_ids=("a",)))
    for rollout in ("train-0-0", "train-1-0"):
        work.apply(RolloutReturned(rollout_id=rollout, attempt=0, reason="late", final=False))
    work.open(opening(0, 3, size=1))
    assert work.next() is None


@given(st.lists(st.integers(0, 30), max_size=40))
def test_settled_groups_are_remembered_whatever_their_order(groups):
    work = Work(0)
    for group in groups:
        work.apply(GroupCompleted(purpose="train", group=group, sample_ids=()))
    work.open(opening(0, 31, size=1))
    assert take_all(work) == [f"train-{g}-0" for g in range(31) if g not in groups]


def test_members_of_a_group_share_a_seed_and_groups_do_not():
    assert task_seed(0, "train", 3) == task_seed(0, "train", 3)
    assert len({task_seed(run, purpose, group) for run in (0, 1) for purpose in "ab" for group in range(50)}) == 200


def test_sessions_are_spread_and_few_move_with_the_number_of_servers():
    ids = [f"sess-{i}" for i in range(3000)]
    owners = [owner_of(i, 3) for i in ids]
    assert all(900 < owners.count(server) < 1100 for server in range(3))
    moved = [i for i, owner in zip(ids, owners, strict=True) if owner_of(i, 4) != owner]
    assert 600 < len(moved) < 900
    assert {owner_of(i, 4) for i in moved} == {3}
