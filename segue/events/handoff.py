"""The plan by which accelerator memory changes hands."""

from __future__ import annotations

from segue.events.base import Body, fact


@fact(
    "handoff.planned",
    emitter="controller",
    key=("pause",),
    identity=("steps",),
    follows="HandoffFinished or HandoffFailed",
)
class HandoffPlanned(Body, frozen=True):
    """The ordered steps of one handoff with the peaks predicted for them."""

    pause: int
    steps: tuple[str, ...]
    predicted_device_bytes: int
    predicted_host_bytes: int


@fact("handoff.finished", emitter="controller", key=("pause",))
class HandoffFinished(Body, frozen=True):
    pause: int


@fact("handoff.failed", emitter="controller", key=("pause",))
class HandoffFailed(Body, frozen=True):
    pause: int
    step: str
    reason: str
