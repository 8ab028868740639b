"""Bytes to events and back, strictly.

A known type of a known version decodes or raises CodecError with type, version and field path. An older version goes
through its upcasters. An unknown type or a newer version is kept as `body=None`: log and debugger carry it along,
decision code never sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from segue.errors import CodecError
from segue.events.base import LATEST, REGISTRY, Body, Envelope
from segue.ids import EventId

Upcaster = Callable[[dict[str, object]], dict[str, object]]
_UPCASTERS: dict[tuple[str, int], Upcaster] = {}
_ENVELOPES = msgspec.json.Decoder(Envelope)
_BODIES: dict[type[Body], msgspec.json.Decoder[Body]] = {}
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event as it stands in a log. `body` is None for types or versions that this build does not know."""

    position: int
    envelope: Envelope
    body: Body | None

    @property
    def id(self) -> EventId:
        return self.envelope.id


def upcast(name: str, version: int) -> Callable[[Upcaster], Upcaster]:
    """Register how a body of `version` becomes one of `version + 1`; lives beside the event's class."""

    def register(function: Upcaster) -> Upcaster:
        _UPCASTERS[name, version] = function
        return function

    return register


def encode_body(body: Body) -> bytes:
    return _ENCODER.encode(body)


def encode(envelope: Envelope) -> bytes:
    return _ENCODER.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    try:
        return _ENVELOPES.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"event envelope: {error}") from error


def decode_body(name: str, version: int, raw: bytes) -> Body | None:
    """The body as the newest version of its type, or None if this build does not know it."""
    newest = LATEST.get(name)
    if newest is None or version > newest.SPEC.version:
        return None
    if version < newest.SPEC.version:
        raw = _raise_version(name, version, newest.SPEC.version, raw)
    decoder = _BODIES.get(newest)
    if decoder is None:
        decoder = _BODIES[newest] = msgspec.json.Decoder(newest, strict=True)
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise CodecError(f"event {name} v{version}: {error}") from error


def _raise_version(name: str, version: int, newest: int, raw: bytes) -> bytes:
    try:
        fields: dict[str, object] = msgspec.json.decode(raw, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise CodecError(f"event {name} v{version}: {error}") from error
    for step in range(version, newest):
        upcaster = _UPCASTERS.get((name, step))
        if upcaster is None:
            raise CodecError(f"event {name} v{version}: no upcaster from v{step} to v{step + 1}")
        fields = upcaster(fields)
    return msgspec.json.encode(fields)


def decode(position: int, data: bytes) -> Recorded:
    envelope = decode_envelope(data)
    return Recorded(position, envelope, decode_body(envelope.type, envelope.version, bytes(envelope.body)))


def known_types() -> dict[str, type[Body]]:
    """Newest class of every registered event, by name."""
    return dict(sorted(LATEST.items()))


__all__ = [
    "REGISTRY",
    "Recorded",
    "decode",
    "decode_body",
    "decode_envelope",
    "encode",
    "encode_body",
    "known_types",
    "upcast",
]
