"""Moving the parts of an owner off and onto the accelerator."""

from __future__ import annotations

from segue.events.base import Body, command, fact


@command("offload.release", handler="rollout or trainer actor", key=("pause", "owner", "tags"), follows="Released")
class Release(Body, frozen=True):
    pause: int
    owner: str
    tags: tuple[str, ...]


@command("offload.onload", handler="rollout or trainer actor", key=("pause", "owner", "tags"), follows="Onloaded")
class Onload(Body, frozen=True):
    pause: int
    owner: str
    tags: tuple[str, ...]


@fact("offload.released", emitter="rollout or trainer actor", key=("pause", "owner", "tags"))
class Released(Body, frozen=True):
    """Bytes on device and host before and after, as the owner measures them (0 where nothing is measured)."""

    pause: int
    owner: str
    tags: tuple[str, ...]
    device_bytes_before: int
    device_bytes_after: int
    host_bytes_before: int
    host_bytes_after: int


@fact("offload.onloaded", emitter="rollout or trainer actor", key=("pause", "owner", "tags"))
class Onloaded(Body, frozen=True):
    pause: int
    owner: str
    tags: tuple[str, ...]
    device_bytes_before: int
    device_bytes_after: int
    host_bytes_before: int
    host_bytes_after: int
