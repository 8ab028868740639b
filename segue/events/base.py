"""How an event is defined, and the envelope it travels in.

An event is one frozen struct, registered under a dotted name with a version. Facts report and are folded into state;
commands ask and are handled by their targets. Two declarations make appends safe to repeat:

* `key`: the fields that say *which* fact this is (its logical key). The log holds at most one fact of a key.
* `identity`: the fields in which a repetition must agree. An equal one is a no-op, a different one is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import msgspec

from segue.ids import EventId

INLINE_LIMIT_BYTES = 16 * 1024
"""Bulk bytes above this size live in the blob store: larger stream entries slow every reader of the log."""

MANY = "*"


class Bulk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes that belong to an event: inline when small, otherwise in the blob store under `digest`.

    digest: sha256 hex of the bytes; size: their number; inline: the bytes themselves or None.
    """

    digest: str
    size: int
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """What a registered event declares beside its fields."""

    name: str
    version: int
    kind: Literal["fact", "command"]
    emitter: str
    handler: str
    key: tuple[str, ...]
    identity: tuple[str, ...]
    follows: str


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of all event bodies."""

    SPEC: ClassVar[Spec]

    def logical_key(self) -> str | None:
        """The fact's logical key as one string, or None if repetitions are different facts."""
        if not self.SPEC.key:
            return None
        return "|".join([self.SPEC.name, *(str(getattr(self, name)) for name in self.SPEC.key)])

    def identity_digest(self) -> str:
        """Digest of the identity fields; two facts of one key must agree in it."""
        values = [getattr(self, name) for name in self.SPEC.identity]
        return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:32]


Event = TypeVar("Event", bound=type[Body])
REGISTRY: dict[tuple[str, int], type[Body]] = {}
LATEST: dict[str, type[Body]] = {}


def _register(cls: type[Body], spec: Spec) -> None:
    if (spec.name, spec.version) in REGISTRY:
        raise ValueError(f"event {spec.name} v{spec.version} is defined twice")
    missing = [f for f in (*spec.key, *spec.identity) if f not in cls.__struct_fields__]
    if missing:
        raise ValueError(f"event {spec.name} declares unknown fields {missing}")
    cls.SPEC = spec
    REGISTRY[spec.name, spec.version] = cls
    newest = LATEST.get(spec.name)
    if newest is None or newest.SPEC.version < spec.version:
        LATEST[spec.name] = cls


def fact(
    name: str,
    *,
    version: int = 1,
    emitter: str,
    key: tuple[str, ...] = (),
    identity: tuple[str, ...] = (),
    follows: str = "",
) -> Callable[[Event], Event]:
    """Register a fact: `emitter` appends it, `follows` says what must come after it and within which deadline."""

    def register(cls: Event) -> Event:
        _register(cls, Spec(name, version, "fact", emitter, "", key, identity, follows))
        return cls

    return register


def command(
    name: str, *, version: int = 1, handler: str, key: tuple[str, ...], follows: str
) -> Callable[[Event], Event]:
    """Register a command: the controller appends it, `handler` carries it out, `follows` names the answering fact.

    `key` makes the command idempotent: deciding it again after a crash appends nothing.
    """

    def register(cls: Event) -> Event:
        _register(cls, Spec(name, version, "command", "controller", handler, key, key, follows))
        return cls

    return register


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every event carries, whatever its body says.

    wall_s: seconds since the epoch at the producer; mono_s: the producer's monotonic clock;
    cause: the event that led to this one; trace: an id shared by everything of one session, step or pause.
    """

    id: EventId
    type: str
    version: int
    wall_s: float
    mono_s: float
    body: msgspec.Raw
    cause: EventId | None = None
    trace: str | None = None
