"""What holds for every routing policy: never an engine that must not be used, and a session stays where it is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import policies
from router.assign import Assigner
from router.state import Engine, RouterState
from segue.errors import ConfigError, RequestError

pytestmark = pytest.mark.parametrize("name", policies.names())

ENGINES = st.lists(
    st.builds(
        lambda version, up, torn, drain: (version, up, torn, drain),
        st.integers(0, 2), st.booleans(), st.booleans(), st.none() | st.just(1),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


def assigner(name: str, *engines: Engine, admitted: int = 1) -> Assigner:
    state = RouterState({one.engine_id: one for one in engines}, admitted)
    return Assigner(state, policies.create(name), admission_open=True)


def well(engine_id: str) -> Engine:
    return Engine(engine_id, "a", f"http://{engine_id}", 1)


@given(made=ENGINES, sick=st.sets(st.integers(0, 5)), exclude=st.sets(st.integers(0, 5)))
def test_only_usable_engines_are_ever_named(
    name: str, made: list[tuple[int, bool, bool, int | None]], sick: set[int], exclude: set[int]
) -> None:
    engines = [
        Engine(f"e{i}", "a", "", version, up=up, torn=torn, drain=drain)
        for i, (version, up, torn, drain) in enumerate(made)
    ]
    one = assigner(name, *engines)
    one.sick = {f"e{i}" for i in sick}
    avoid = {f"e{i}" for i in exclude}
    allowed = {
        e.engine_id
        for e in engines
        if e.up and not e.torn and e.drain is None and e.version == 1 and e.engine_id not in one.sick | avoid
    }
    for session in range(8):
        if allowed:
            assert one.assign(f"s{session}", avoid).engine_id in allowed
        else:
            with pytest.raises(RequestError, match="no healthy engine"):
                one.assign(f"s{session}", avoid)


def test_a_session_keeps_its_engine_while_others_come_and_go(name: str) -> None:
    one = assigner(name, well("e1"), well("e2"))
    first = one.assign("s").engine_id
    for i in range(10):
        one.assign(f"other-{i}")
    one.state.engines["e0"] = well("e0")
    assert one.assign("s").engine_id == first


@pytest.mark.parametrize("trouble", ["lost", "torn", "draining", "behind", "sick", "excluded"])
def test_a_session_moves_for_good_when_its_engine_may_not_be_used(name: str, trouble: str) -> None:
    one = assigner(name, well("e0"), well("e1"))
    first = one.assign("s").engine_id
    engine = one.state.engines[first]
    exclude = [first] if trouble == "excluded" else []
    match trouble:
        case "lost":
            engine.up = False
        case "torn":
            engine.torn = True
        case "draining":
            engine.drain = 1
        case "behind":
            engine.version = 0
        case "sick":
            one.sick.add(first)
    second = one.assign("s", exclude).engine_id
    assert second != first
    engine.up, engine.torn, engine.drain, engine.version = True, False, None, 1
    one.sick.clear()
    assert one.assign("s").engine_id == second


def test_sessions_spread_evenly_over_equal_engines(name: str) -> None:
    one = assigner(name, well("e0"), well("e1"), well("e2"))
    counts = Counter(one.assign(f"s{i}").engine_id for i in range(30))
    assert counts == {"e0": 10, "e1": 10, "e2": 10}


def test_while_admission_is_closed_only_known_sessions_are_placed(name: str) -> None:
    one = assigner(name, well("e0"), well("e1"))
    first = one.assign("known").engine_id
    one.admission_open = False
    one.state.engines[first].up = False
    assert one.assign("known").engine_id != first
    with pytest.raises(RequestError, match="closed") as refused:
        one.assign("new")
    assert refused.value.status == 503


def test_plain_requests_count_as_load_while_they_run_and_avoid_paused_engines(name: str) -> None:
    one = assigner(name, well("e0"), well("e1"))
    one.state.engines["e0"].paused = True
    with one.plain() as chosen:
        assert chosen.engine_id == "e1"
        assert one.plain_in_flight["e1"] == 1
    assert one.plain_in_flight["e1"] == 0
    one.admission_open = False
    with pytest.raises(RequestError, match="closed"), one.plain():
        pass


def test_an_unknown_policy_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        policies.create(f"{name}-no")
