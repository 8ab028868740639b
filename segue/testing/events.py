"""Events for tests: one with given words, and one canonical example of every registered type.

The example is derived from the type's fields alone, so it is the same on every machine; the golden files pin its bytes.
"""

from __future__ import annotations

import msgspec

from segue.events import codec
from segue.events.base import Body, Envelope
from segue.events.run import AlarmRaised
from segue.ids import EventId
from segue.log.protocol import Prepared


def alarm(kind: str = "test", subject: str = "nobody", detail: str = "") -> AlarmRaised:
    """A fact without a logical key: every repetition is a fact of its own."""
    return AlarmRaised(kind=kind, subject=subject, detail=detail)


def example[B: Body](cls: type[B]) -> B:
    """An instance with every field set, derived from names and types of the fields."""
    return msgspec.convert(_value(cls.SPEC.name, msgspec.inspect.type_info(cls)), cls)


def _value(name: str, kind: msgspec.inspect.Type) -> object:
    match kind:
        case msgspec.inspect.StrType():
            return f"a {name.replace('_', ' ')}"
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return len(name)
        case msgspec.inspect.FloatType():
            return len(name) + 0.5
        case msgspec.inspect.BytesType():
            return b"\x00\xff bytes"
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.UnionType():
            return _value(name, next(t for t in kind.types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return [_value(name, kind.item_type), _value(f"other_{name}", kind.item_type)]
        case msgspec.inspect.TupleType():
            return [_value(f"{name}_{i}", item) for i, item in enumerate(kind.item_types)]
        case msgspec.inspect.DictType():
            return {f"a {name} key": _value(name, kind.value_type)}
        case msgspec.inspect.StructType():
            return {field.encode_name: _value(field.name, field.type) for field in kind.fields}
        case _:
            raise TypeError(f"field {name} has the type {kind}, of which there is no example yet")


class Pen:
    """Numbers events of one producer by hand, for tests that need to repeat, skip or reorder them."""

    def __init__(self, run: str, producer: str, epoch: int) -> None:
        self.run, self.producer, self.epoch, self.seq = run, producer, epoch, 0

    def prepare(
        self,
        body: Body | None = None,
        *,
        seq: int | None = None,
        targets: tuple[str, ...] = (),
        expect: tuple[str, int] | None = None,
    ) -> Prepared:
        """The next event of this producer (or the one numbered `seq`), encoded as the Writer would."""
        if seq is None:
            self.seq += 1
            seq = self.seq
        body = body if body is not None else alarm(subject=self.producer, detail=f"{self.epoch}/{seq}")
        return prepare(EventId(self.run, self.producer, self.epoch, seq), body, targets=targets, expect=expect)


def prepare(
    event_id: EventId,
    body: Body,
    *,
    targets: tuple[str, ...] = (),
    expect: tuple[str, int] | None = None,
    wall_s: float = 0.0,
) -> Prepared:
    """An event ready to append, with a given id and time."""
    spec, key = body.SPEC, body.logical_key()
    envelope = Envelope(event_id, spec.name, spec.version, wall_s, 0.0, msgspec.Raw(codec.encode_body(body)))
    return Prepared(
        event_id.producer, event_id.epoch, event_id.seq, codec.encode(envelope), key or "",
        body.identity_digest() if key else "", targets, expect,
    )  # fmt: skip
