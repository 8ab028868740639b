"""The handoff planner against the closed forms of both orders, over every combination of what a run can choose."""

from __future__ import annotations

from itertools import product
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.handoff import (
    ROLLOUT_TAGS,
    TRAINER_TAGS,
    Limits,
    Order,
    Residency,
    Sizes,
    choose,
    cycle,
    peaks_of,
    rollout_released,
    steps_to,
)
from segue.errors import ConfigError

ORDERS: tuple[Order, ...] = ("host", "device")
LEVELS = [("kv_cache",), ("weights",), ("weights", "kv_cache"), ("weights", "kv_cache", "cuda_graph")]


def sizes(*, mirror: bool = True, pinned: bool = True) -> Sizes:
    """Powers of two, so that every sum tells what is in it."""
    return Sizes(
        weights=1 << 20, mirror=(1 << 21) if mirror else 0, kv_cache=1 << 22, cuda_graph=1 << 23, params=1 << 24,
        grads=1 << 25, optimizer=1 << 26, default=1 << 27, activations=1 << 28, backup=1 << 29,
        pinned=(1 << 30) if pinned else 0, loading=1 << 31, contexts=1 << 32, bucket=1 << 10,
    )  # fmt: skip


def shown(steps: object) -> list[str]:
    assert isinstance(steps, tuple)
    return [str(step) for step in steps]


@pytest.mark.parametrize(
    ("order", "level", "mirror", "pinned"), list(product(ORDERS, LEVELS, (True, False), (True, False)))
)
def test_peaks_equal_the_formulas(order: Order, level: tuple[str, ...], mirror: bool, pinned: bool) -> None:
    s = sizes(mirror=mirror, pinned=pinned)
    away = rollout_released(level)
    engine = s.weights + s.kv_cache + s.cuda_graph
    stays = sum(s.of(tag) for tag in ROLLOUT_TAGS if tag not in away)
    trainer = s.params + s.grads + s.optimizer + s.default
    weights_leave = "weights" in away
    me = s.mirror if weights_leave else 0

    at_work = s.contexts + max(engine, stays + trainer + s.activations)
    overlap = s.contexts + trainer + (stays if not weights_leave else stays + s.weights)
    device = max(at_work, overlap) if order == "device" else at_work
    both = s.pinned + me + max(s.loading, s.backup)
    host = both if order == "host" else s.pinned + max(s.loading, me, s.backup)
    assert peaks_of(order, level, s) == (device, host)


def test_a_sync_holds_two_buckets_and_without_pinned_copies_the_parameters() -> None:
    for order, pinned in product(ORDERS, (True, False)):
        s = sizes(pinned=pinned)
        back = cycle(order, ("weights", "kv_cache"), s)[2]
        (sync,) = [step for step in back.steps if step.action == "sync"]
        held = s.contexts + s.weights + 2 * s.bucket + (0 if pinned else s.params)
        assert sync.device_peak_bytes == held, (order, pinned)


def test_the_two_orders_step_by_step() -> None:
    level = ("weights", "kv_cache")
    trainer = "+".join(TRAINER_TAGS)
    _, train, back = cycle("host", level, sizes())
    assert shown(train.steps) == [
        "release rollout weights+kv_cache+cuda_graph", f"onload trainer {trainer}", "train trainer",
    ]  # fmt: skip
    assert shown(back.steps) == [
        "drop trainer grads", "release trainer params+optimizer+default", "onload rollout weights", "sync trainer",
        "onload rollout cuda_graph+kv_cache",
    ]  # fmt: skip
    start, train, back = cycle("device", level, sizes())
    assert shown(start.steps) == [
        "release rollout kv_cache+cuda_graph", "load trainer", "drop trainer grads",
        "release trainer params+optimizer+default", "sync trainer", "onload rollout cuda_graph+kv_cache",
    ]  # fmt: skip
    assert shown(train.steps) == [
        "release rollout kv_cache+cuda_graph", f"onload trainer {trainer}", "release rollout weights", "train trainer",
    ]  # fmt: skip
    assert shown(back.steps) == [
        "drop trainer grads", "onload rollout weights", "release trainer params+optimizer+default", "sync trainer",
        "onload rollout cuda_graph+kv_cache",
    ]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", LEVELS)
def test_what_never_left_is_never_onloaded(order: Order, level: tuple[str, ...]) -> None:
    """Released set and onloaded set come from one function, at start and in the loop."""
    released: set[tuple[str, str]] = set()
    for plan in cycle(order, level, sizes()):
        for step in plan.steps:
            pairs = {(step.owner, tag) for tag in step.tags}
            if step.action == "onload":
                assert pairs <= released, step
                released -= pairs
            elif step.action in ("release", "drop"):
                assert not pairs & released, step
                released |= pairs
        assert released == set(plan.after)
        assert {tag for owner, tag in released if owner == "rollout"} <= set(rollout_released(level))


def test_an_engine_that_comes_back_gives_up_what_the_others_have_given_up() -> None:
    """It starts with everything on the device; in the middle of training only what the level says may stay."""
    level = ("weights", "kv_cache")
    for order in ORDERS:
        trained = cycle(order, level, sizes())[1].after
        fresh: Residency = frozenset(pair for pair in trained if pair[0] == "trainer")
        recovered = steps_to("training", fresh, order=order, level=level, sizes=sizes(), sync=False)
        assert recovered.after == trained
        again = steps_to("training", trained, order=order, level=level, sizes=sizes(), sync=False)
        assert shown(again.steps) == ["train trainer"]


def test_an_evaluation_without_new_weights_needs_no_sync() -> None:
    trained = cycle("device", ("weights", "kv_cache"), sizes())[1].after
    plan = steps_to("rollout", trained, order="device", level=("weights", "kv_cache"), sizes=sizes(), sync=False)
    assert "sync trainer" not in shown(plan.steps)
    assert {owner for owner, _ in plan.after} == {"trainer"}


def test_auto_takes_the_order_that_fits_and_of_two_the_one_that_spares_the_host() -> None:
    level, s = ("weights", "kv_cache"), sizes()
    # Make the mirror matter: both copies at once are what the device order saves.
    s = Sizes(**{**{n: getattr(s, n) for n in Sizes.__slots__}, "loading": 0, "activations": 0, "mirror": 1 << 29})
    host_device, host_host = peaks_of("host", level, s)
    device_device, device_host = peaks_of("device", level, s)
    assert host_host - device_host == min(s.mirror, s.backup)
    roomy = Limits(max(host_device, device_device), max(host_host, device_host))
    assert choose("auto", level, s, roomy) == "device"
    assert choose("auto", level, s, Limits(host_device, host_host)) == "host"
    assert choose("auto", level, s, Limits(device_device, device_host)) == "device"
    assert choose("host", level, s, roomy) == "host"


def test_no_saving_without_a_mirror() -> None:
    s = sizes(mirror=False)
    level = ("weights", "kv_cache")
    assert peaks_of("host", level, s)[1] == peaks_of("device", level, s)[1]
    roomy = Limits(1 << 40, 1 << 40)
    assert choose("auto", level, s, roomy) == "host", "equal on the host: the one that takes less of the device"


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"no order fits 1\.0 GiB of device memory .* \"host\" needs 4\.5 GiB"):
        choose("auto", ("weights", "kv_cache"), sizes(), Limits(1 << 30, 1 << 40))
    with pytest.raises(ConfigError, match=r"offload\.level: kv unknown"):
        rollout_released(("kv",))


amounts = st.integers(0, 1 << 40)


@given(
    st.builds(
        Sizes,
        weights=amounts,
        mirror=amounts,
        kv_cache=amounts,
        cuda_graph=amounts,
        params=amounts,
        grads=amounts,
        optimizer=amounts,
        default=amounts,
        activations=amounts,
        backup=amounts,
        pinned=amounts,
        loading=amounts,
        contexts=amounts,
        bucket=amounts,
    ),
    st.sampled_from(ORDERS),
    st.sampled_from(LEVELS),
    st.sets(st.sampled_from([("rollout", tag) for tag in ROLLOUT_TAGS] + [("trainer", tag) for tag in TRAINER_TAGS])),
    st.sampled_from(["rollout", "training"]),
)
def test_from_any_residency_the_phase_is_reached(
    s: Sizes,
    order: Order,
    level: tuple[str, ...],
    released: set[tuple[Literal["rollout", "trainer"], str]],
    phase: Literal["rollout", "training"],
) -> None:
    """Also after a handoff that stopped half way."""
    plan = steps_to(phase, frozenset(released), order=order, level=level, sizes=s, sync=phase == "rollout")
    if phase == "rollout":
        assert plan.after == frozenset(("trainer", tag) for tag in TRAINER_TAGS)
    else:
        assert {pair for pair in plan.after if pair[0] == "trainer"} == set()
        assert {tag for owner, tag in plan.after if owner == "rollout"} >= set(rollout_released(level))
    assert all(step.device_peak_bytes >= step.device_bytes for step in plan.steps)
    assert all(step.host_peak_bytes >= step.host_bytes for step in plan.steps)
