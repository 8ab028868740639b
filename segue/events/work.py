"""Rollouts as units of work: admission, leases, groups."""

from __future__ import annotations

from typing import Literal

from segue.events.base import Body, command, fact


@command(
    "work.open_admission", handler="session servers, router", key=("admission",), follows="AdmissionOpened within 10 s"
)
class OpenAdmission(Body, frozen=True):
    """Lease the rollouts of groups [first_group, end_group); held turns go on. `admission` numbers all openings."""

    admission: int
    purpose: Literal["train", "eval"]
    step: int
    first_group: int
    end_group: int
    group_size: int


@command(
    "work.close_admission", handler="session servers, router", key=("pause",), follows="AdmissionClosed within 10 s"
)
class CloseAdmission(Body, frozen=True):
    """Lease nothing more and hold new turns until the next OpenAdmission."""

    pause: int


@fact("work.admission_opened", emitter="session servers, router", key=("admission", "service"))
class AdmissionOpened(Body, frozen=True):
    admission: int
    service: str


@fact("work.admission_closed", emitter="session servers, router", key=("pause", "service"))
class AdmissionClosed(Body, frozen=True):
    """From here on this service starts no request at an engine until the engine was resumed."""

    pause: int
    service: str


@fact(
    "work.rollout_reserved",
    emitter="session server",
    key=("rollout_id", "attempt"),
    identity=("session_id",),
    follows="RolloutReceived, RolloutReturned or the end of its session by deadline_wall_s",
)
class RolloutReserved(Body, frozen=True):
    """A rollout was leased to an environment worker through `session_id`."""

    rollout_id: str
    attempt: int
    session_id: str
    purpose: Literal["train", "eval"]
    group: int
    member: int
    seed: int
    deadline_wall_s: float
    worker: str = ""
    """`name/incarnation` of the environment worker; a new incarnation of a name ends the leases of the old one."""


@fact("work.rollout_received", emitter="session server", key=("rollout_id",), identity=("session_id",))
class RolloutReceived(Body, frozen=True):
    """The environment finished the rollout; its sample (if it has one) is in the log."""

    rollout_id: str
    session_id: str
    status: str


@fact("work.rollout_returned", emitter="session server", key=("rollout_id", "attempt"), follows="a new RolloutReserved")
class RolloutReturned(Body, frozen=True):
    """The lease ended without a finish; the rollout can be leased again unless `final`."""

    rollout_id: str
    attempt: int
    reason: str
    final: bool


@fact("work.group_completed", emitter="controller", key=("purpose", "group"), identity=("sample_ids",))
class GroupCompleted(Body, frozen=True):
    """Every member of the group has its sample."""

    purpose: Literal["train", "eval"]
    group: int
    sample_ids: tuple[str, ...]


@fact("work.group_dropped", emitter="controller", key=("purpose", "group"), identity=())
class GroupDropped(Body, frozen=True):
    """The group will not train: a member failed, or a filter rejected it."""

    purpose: Literal["train", "eval"]
    group: int
    reason: str
