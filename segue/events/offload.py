"""Moving the parts of an owner off and onto the accelerator."""

from __future__ import annotations

from segue.events.base import Body, command, fact


@command(
    "offload.release",
    handler="rollout or trainer actor",
    key=("owner", "incarnation", "move"),
    follows="Released",
)
class Release(Body, frozen=True):
    """Give back the memory of `tags`. `owner`: an engine's id or "trainer"; a new incarnation holds everything.
    `move` numbers the moves of an incarnation from 1, releases and onloads alike."""

    pause: int
    owner: str
    incarnation: str
    move: int
    tags: tuple[str, ...]


@command(
    "offload.onload",
    handler="rollout or trainer actor",
    key=("owner", "incarnation", "move"),
    follows="Onloaded",
)
class Onload(Body, frozen=True):
    """Take the memory of `tags` back."""

    pause: int
    owner: str
    incarnation: str
    move: int
    tags: tuple[str, ...]


@fact("offload.released", emitter="rollout or trainer actor", key=("owner", "incarnation", "move"))
class Released(Body, frozen=True):
    """Bytes on device and host before and after, as the owner measures them (0 where nothing is measured)."""

    pause: int
    owner: str
    incarnation: str
    move: int
    tags: tuple[str, ...]
    device_bytes_before: int
    device_bytes_after: int
    host_bytes_before: int
    host_bytes_after: int


@fact("offload.onloaded", emitter="rollout or trainer actor", key=("owner", "incarnation", "move"))
class Onloaded(Body, frozen=True):
    pause: int
    owner: str
    incarnation: str
    move: int
    tags: tuple[str, ...]
    device_bytes_before: int
    device_bytes_after: int
    host_bytes_before: int
    host_bytes_after: int
