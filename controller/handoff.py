"""The handoff planner: in which order two owners of one device hand its memory to each other, and what that costs.

Pure: sizes and residency in, ordered steps with predicted bytes out; the same function serves start, loop, evaluation
and recovery. Residency is a set of released (owner, tag) pairs; whatever is released already is not released again,
and onloading what was never released is no step at all, so a plan is idempotent.

Letters, per device: We engine weights, Me their host mirror, K KV cache, G captured graphs, P trainer parameters,
Gr gradients, O optimizer state and the rest, A activations, Bt host backup of the sleeping trainer, T pinned model
copies on the host, L host bytes while loading, C contexts of both owners, B one bucket of a weight sync.

Two orders. "host": the owner that leaves goes first, so that both host copies exist at once: host peak
T + Me + max(L, Bt), device peak C + max(We + K + G, P + Gr + O + A). "device": the owner that comes is onloaded
before the other one leaves: host peak T + max(L, Me, Bt), device peak also C + We + P + Gr + O. The saving is
min(Me, Bt), and none without a mirror. A sync holds two buckets in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from segue.config.schema import Offload
from segue.errors import ConfigError

Owner = Literal["rollout", "trainer"]
Order = Literal["host", "device"]
MemoryPeak = Literal["host", "device", "auto"]
Phase = Literal["rollout", "training"]
Action = Literal["release", "onload", "drop", "load", "train", "sync"]
Residency = frozenset[tuple[Owner, str]]
"""The (owner, tag) pairs that are released."""

ROLLOUT: Owner = "rollout"
TRAINER: Owner = "trainer"
ROLLOUT_TAGS = ("weights", "kv_cache", "cuda_graph")
TRAINER_TAGS = ("params", "grads", "optimizer", "default")
ALL_RESIDENT: Residency = frozenset()
_SYNC_BUCKETS = 2
_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes per device. `mirror` is 0 if released engine weights leave no host copy; `pinned` is 0 if the trainer
    keeps no host copies of the model, so that a sync reads its parameters on the device."""

    weights: int
    mirror: int
    kv_cache: int
    cuda_graph: int
    params: int
    grads: int
    optimizer: int
    default: int = 0
    activations: int
    backup: int
    pinned: int
    loading: int
    contexts: int
    bucket: int

    def of(self, tag: str) -> int:
        """Device bytes of one tag of either owner."""
        return int(getattr(self, tag))


def sizes_of(config: Offload) -> Sizes:
    """Sizes in bytes as a run's configuration gives them. Raises ConfigError for a name that there is not."""
    unknown = sorted(set(config.sizes_gib) - set(SIZE_NAMES))
    if unknown:
        raise ConfigError(f"offload.sizes_gib: {', '.join(unknown)} unknown; there are {', '.join(SIZE_NAMES)}")
    return Sizes(**{name: int(config.sizes_gib.get(name, 0.0) * _GIB) for name in SIZE_NAMES})


SIZE_NAMES = tuple(field.name for field in fields(Sizes))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has, and its share of the host's memory, in bytes."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step with the bytes predicted after it, and the most that is held while it runs."""

    action: Action
    owner: Owner
    tags: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int

    def __str__(self) -> str:
        return f"{self.action} {self.owner} {'+'.join(self.tags)}".rstrip()


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one handoff in order, and the residency after the last."""

    order: Order
    steps: tuple[Step, ...]
    after: Residency
    device_peak_bytes: int
    host_peak_bytes: int


def rollout_released(level: Iterable[str]) -> tuple[str, ...]:
    """What of an engine leaves the device for training at this offload level; the one place that says so."""
    chosen = set(level)
    unknown = chosen - set(ROLLOUT_TAGS)
    if unknown:
        raise ConfigError(f"offload.level: {', '.join(sorted(unknown))} unknown; there are {', '.join(ROLLOUT_TAGS)}")
    # Captured graphs point into the cache: they leave and come back with it.
    return tuple(tag for tag in ROLLOUT_TAGS if tag in chosen or (tag == "cuda_graph" and "kv_cache" in chosen))


class _Ledger:
    """Carries out steps on numbers: residency and bytes as they would be."""

    def __init__(self, sizes: Sizes, released: Residency) -> None:
        self.sizes, self.released, self.steps = sizes, set(released), list[Step]()
        self.loaded = True

    def device(self) -> int:
        rollout = sum(self.sizes.of(tag) for tag in ROLLOUT_TAGS if ("rollout", tag) not in self.released)
        trainer = sum(self.sizes.of(tag) for tag in TRAINER_TAGS if ("trainer", tag) not in self.released)
        return self.sizes.contexts + rollout + (trainer if self.loaded else 0)

    def host(self) -> int:
        s = self.sizes
        mirror = s.mirror if ("rollout", "weights") in self.released else 0
        backup = s.backup if ("trainer", "optimizer") in self.released else 0
        return s.pinned + mirror + backup

    def _step(self, action: Action, owner: Owner, tags: Sequence[str], before: tuple[int, int], more: int = 0) -> None:
        device, host = self.device(), self.host()
        self.steps.append(
            Step(
                action, owner, tuple(tags), device, host, max(before[0], device + more), max(before[1], host),
            )
        )  # fmt: skip

    def release(self, owner: Owner, tags: Iterable[str]) -> None:
        gone = [tag for tag in tags if (owner, tag) not in self.released]
        if gone:
            before = self.device(), self.host()
            self.released |= {(owner, tag) for tag in gone}
            self._step("release", owner, gone, before)

    def onload(self, owner: Owner, tags: Iterable[str]) -> None:
        """The host copy is given back only when all is on the device."""
        come = [tag for tag in tags if (owner, tag) in self.released]
        if come:
            before = self.device(), self.host()
            self.released -= {(owner, tag) for tag in come}
            self._step("onload", owner, come, before)

    def drop(self) -> None:
        """Caches of the trainer and its gradients, which need no copy: they are made anew."""
        if ("trainer", "grads") not in self.released:
            before = self.device(), self.host()
            self.released.add(("trainer", "grads"))
            self._step("drop", "trainer", ("grads",), before)

    def load(self) -> None:
        """The trainer starts and reads its checkpoint."""
        before = self.device(), self.host() + self.sizes.loading
        self.loaded = True
        self._step("load", "trainer", (), before)

    def train(self) -> None:
        self._step("train", "trainer", (), (self.device(), self.host()), self.sizes.activations)

    def sync(self) -> None:
        now = self.device(), self.host()
        self._step("sync", "trainer", (), now, _SYNC_BUCKETS * self.sizes.bucket)


def steps_to(
    phase: Phase,
    released: Residency,
    *,
    order: Order,
    level: Iterable[str],
    sizes: Sizes,
    sync: bool,
    start: bool = False,
) -> Plan:
    """The handoff from `released` to `phase`. `sync`: weights are synced on the way (to "rollout" only). `start`: the
    trainer is not there yet and is loaded first, beside engines that have just come up with everything resident."""
    ledger = _Ledger(sizes, released)
    away = rollout_released(level)
    if start:
        ledger.loaded = False
        # In the device order weights that would come straight back never leave.
        ledger.release("rollout", away if order == "host" else [tag for tag in away if tag != "weights"])
        ledger.load()
    if phase == "training":
        _to_training(ledger, order, away)
    else:
        _to_rollout(ledger, order, sync)
    device = max((step.device_peak_bytes for step in ledger.steps), default=ledger.device())
    host = max((step.host_peak_bytes for step in ledger.steps), default=ledger.host())
    return Plan(order, tuple(ledger.steps), frozenset(ledger.released), device, host)


def _to_training(ledger: _Ledger, order: Order, away: Sequence[str]) -> None:
    first = away if order == "host" else [tag for tag in away if tag != "weights"]
    ledger.release("rollout", first)
    ledger.onload("trainer", TRAINER_TAGS)
    ledger.release("rollout", away)
    ledger.train()


def _to_rollout(ledger: _Ledger, order: Order, sync: bool) -> None:
    from_params = sync and ledger.sizes.pinned == 0
    leaving = [tag for tag in TRAINER_TAGS if not (from_params and tag == "params")]
    ledger.drop()
    if order == "device":
        ledger.onload("rollout", ("weights",))
        ledger.release("trainer", leaving)
    else:
        ledger.release("trainer", leaving)
        ledger.onload("rollout", ("weights",))
    if sync:
        if from_params:
            ledger.onload("trainer", ("params",))
        ledger.sync()
    ledger.release("trainer", TRAINER_TAGS)
    ledger.onload("rollout", ("cuda_graph", "kv_cache"))


def cycle(order: Order, level: Iterable[str], sizes: Sizes) -> tuple[Plan, Plan, Plan]:
    """A run's handoffs: the start, and once round the loop."""
    level = tuple(level)
    start = steps_to("rollout", ALL_RESIDENT, order=order, level=level, sizes=sizes, sync=True, start=True)
    train = steps_to("training", start.after, order=order, level=level, sizes=sizes, sync=False)
    back = steps_to("rollout", train.after, order=order, level=level, sizes=sizes, sync=True)
    return start, train, back


def order_of(config: Offload) -> Order:
    """The order that a run uses. Raises ConfigError if nothing fits."""
    limits = Limits(_bytes_or_all(config.device_gib), _bytes_or_all(config.host_gib))
    return choose(config.memory_peak, config.level, sizes_of(config), limits)


def _bytes_or_all(gib: float) -> int:
    return int(gib * _GIB) if gib else 1 << 62


def choose(memory_peak: MemoryPeak, level: Iterable[str], sizes: Sizes, limits: Limits) -> Order:
    """The order of a whole run. "auto": of those that fit the one with the lower host peak, then the lower device
    peak. Raises ConfigError with the numbers if what is asked for does not fit."""
    level = tuple(level)
    orders: tuple[Order, ...] = ("host", "device") if memory_peak == "auto" else (memory_peak,)
    peaks = {order: peaks_of(order, level, sizes) for order in orders}
    fitting = [o for o in orders if peaks[o][0] <= limits.device_bytes and peaks[o][1] <= limits.host_bytes]
    if fitting:
        return min(fitting, key=lambda order: (peaks[order][1], peaks[order][0]))
    told = "; ".join(
        f'"{order}" needs {_gib(device)} of the device and {_gib(host)} of the host'
        for order, (device, host) in peaks.items()
    )
    raise ConfigError(
        f"offload.memory_peak: no order fits {_gib(limits.device_bytes)} of device memory and "
        f"{_gib(limits.host_bytes)} of host memory: {told}. Give the engine less (engine.mem_fraction_static), the "
        f"trainer smaller micro-batches (trainer.micro_batch_tokens), or offload more (offload.level)"
    )


def peaks_of(order: Order, level: Iterable[str], sizes: Sizes) -> tuple[int, int]:
    """(device, host) peaks of a whole run in this order, the engine at work included."""
    plans = cycle(order, level, sizes)
    return max(plan.device_peak_bytes for plan in plans), max(plan.host_peak_bytes for plan in plans)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
