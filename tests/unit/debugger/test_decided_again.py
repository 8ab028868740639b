"""Recorded runs are decided again, each on the branch it was made by."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from debugger.replay import replay
from segue.events import Recorded, run, step
from segue.log.file import FileLog

HISTORIES = Path(__file__).resolve().parents[2] / "golden" / "histories"


async def history(name: str) -> list[Recorded]:
    return await FileLog(HISTORIES / name).read(0, limit=100_000)


@pytest.mark.parametrize("name", sorted(path.name for path in HISTORIES.iterdir()))
async def test_kept_histories_are_decided_as_they_were(name: str) -> None:
    events = await history(name)
    outcome = replay(events)
    assert outcome.difference is None
    decided = [e for e in events if e.id.producer == "controller"]
    announced = [e for e in decided if isinstance(e.body, run.RunStarted | run.RunResumed)]
    assert outcome.decisions == len(decided) - len(announced) > 20


async def test_as_today_names_the_first_decision_that_a_new_rule_makes_otherwise() -> None:
    """Since version 2 a batch is in the order of its groups; in this history they completed in another order."""
    events = await history("colocated-1")
    batches = [e for e in events if isinstance(e.body, step.TrainStep)]
    unsorted = next(e for e in batches if list(e.body.sample_ids) != sorted(e.body.sample_ids))  # type: ignore[union-attr]
    difference = replay(events, as_today=True).difference
    assert difference is not None
    assert difference.recorded.position == unsorted.position
    assert f"event {unsorted.position}: recorded TrainStep(" in str(difference)


async def test_a_decision_that_was_tampered_with_is_found() -> None:
    events = await history("colocated-1")
    index = next(i for i, e in enumerate(events) if isinstance(e.body, step.TrainStep))
    body = events[index].body
    assert isinstance(body, step.TrainStep)
    other = msgspec.structs.replace(body, seed=body.seed + 1)
    events[index] = Recorded(events[index].position, events[index].envelope, other)
    difference = replay(events).difference
    assert difference is not None
    assert difference.recorded.position == index + 1
    assert body in difference.got
