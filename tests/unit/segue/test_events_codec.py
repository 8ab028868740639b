"""Events decode strictly, old versions go through their upcasters, unknown ones are kept and never understood."""

from __future__ import annotations

import msgspec
import pytest

from segue.errors import CodecError
from segue.events import base, codec
from segue.events.base import Body, Envelope, fact
from segue.events.turn import TurnStarted
from segue.ids import EventId
from segue.testing import alarm, example


def envelope(body: bytes, name: str = "run.alarm", version: int = 1) -> bytes:
    return codec.encode(
        Envelope(EventId("run-1", "w", 1, 1), name, version, 1.5, 2.5, msgspec.Raw(body), EventId("run-1", "w", 1, 0))
    )


@pytest.mark.parametrize("cls", codec.known_types().values(), ids=lambda c: c.SPEC.name)
def test_every_event_survives_the_round_trip(cls: type[Body]) -> None:
    body = example(cls)
    data = envelope(codec.encode_body(body), cls.SPEC.name, cls.SPEC.version)
    recorded = codec.decode(7, data)
    assert recorded.position == 7
    assert recorded.body == body
    assert str(recorded.id) == "run-1/w/1/1"
    assert codec.encode(recorded.envelope) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f | {"extra": 1}, "unknown field `extra`"),
        (lambda f: {k: v for k, v in f.items() if k != "turn_id"}, "missing required field `turn_id`"),
        (lambda f: f | {"prompt_tokens": "12"}, r"Expected `int`, got `str` - at `\$.prompt_tokens`"),
        (lambda f: f | {"session_id": None}, r"Expected `str`, got `null` - at `\$.session_id`"),
    ],
)
def test_a_body_that_is_not_exactly_its_class_is_refused_with_type_version_and_field(change, message) -> None:  # type: ignore[no-untyped-def]
    fields = change(msgspec.json.decode(codec.encode_body(example(TurnStarted))))
    with pytest.raises(CodecError, match=r"event turn.started v1: .*" + message):
        codec.decode_body("turn.started", 1, msgspec.json.encode(fields))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"id": ["r", "w", 1, 1]}', b"\xff", b'{"id":1}'])
def test_an_envelope_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError, match="event envelope"):
        codec.decode_envelope(data)


def test_unknown_types_and_newer_versions_are_kept_without_a_body() -> None:
    for name, version in (("from.the_future", 1), ("run.alarm", 99)):
        data = envelope(b'{"what":"ever"}', name, version)
        recorded = codec.decode(1, data)
        assert recorded.body is None
        assert bytes(recorded.envelope.body) == b'{"what":"ever"}'
        assert codec.encode(recorded.envelope) == data


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes made in the test stay in the test."""
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))
    monkeypatch.setattr(base, "LATEST", latest := dict(base.LATEST))
    monkeypatch.setattr(codec, "LATEST", latest)
    monkeypatch.setattr(codec, "_UPCASTERS", {})


@pytest.mark.usefixtures("empty_registry")
def test_an_older_version_goes_through_every_upcaster_between() -> None:
    @fact("test.moved", version=3, emitter="a test")
    class Moved(Body, frozen=True):
        metres: float
        by: str

    codec.upcast("test.moved", 1)(lambda fields: {"centimetres": fields["cm"]})
    codec.upcast("test.moved", 2)(lambda fields: {"metres": float(str(fields["centimetres"])) / 100, "by": "nobody"})
    assert codec.decode_body("test.moved", 1, b'{"cm": 250}') == Moved(metres=2.5, by="nobody")
    assert codec.decode_body("test.moved", 2, b'{"centimetres": 50}') == Moved(metres=0.5, by="nobody")
    assert codec.decode_body("test.moved", 3, b'{"metres": 1, "by": "x"}') == Moved(metres=1.0, by="x")
    assert codec.decode_body("test.moved", 4, b'{"anything": 1}') is None


@pytest.mark.usefixtures("empty_registry")
def test_a_version_without_an_upcaster_is_refused_and_not_guessed() -> None:
    @fact("test.moved", version=2, emitter="a test")
    class Moved(Body, frozen=True):
        metres: float

    with pytest.raises(CodecError, match="no upcaster from v1 to v2"):
        codec.decode_body("test.moved", 1, b'{"metres": 1}')


@pytest.mark.usefixtures("empty_registry")
def test_a_name_and_version_can_be_taken_once_and_keys_must_be_fields() -> None:
    with pytest.raises(ValueError, match="run.alarm v1 is defined twice"):

        @fact("run.alarm", emitter="a test")
        class Again(Body, frozen=True):
            pass

    with pytest.raises(ValueError, match=r"unknown fields \['missing'\]"):

        @fact("test.keyed", emitter="a test", key=("missing",))
        class Keyed(Body, frozen=True):
            there: int


def test_a_logical_key_names_type_and_fields_and_identity_ignores_the_rest() -> None:
    from segue.events.sample import RewardRecorded

    first = RewardRecorded(session_id="s", reward_key="k", value=1.0)
    assert first.logical_key() == "sample.reward_recorded|s|k"
    assert alarm().logical_key() is None
    same, other = RewardRecorded(session_id="s2", reward_key="k", value=1.0), RewardRecorded(
        session_id="s", reward_key="k", value=2.0
    )  # fmt: skip
    assert first.identity_digest() == same.identity_digest() != other.identity_digest()
