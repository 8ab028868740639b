"""The one definition of every event and command. Pure data: nothing in here does I/O or makes decisions."""

from segue.events import base, codec, engine, handoff, offload, run, sample, session, step, turn, weights, work
from segue.events.base import Body, Bulk, Envelope
from segue.events.codec import Recorded

__all__ = [
    "Body", "Bulk", "Envelope", "Recorded", "base", "codec", "engine", "handoff", "offload", "run", "sample",
    "session", "step", "turn", "weights", "work",
]  # fmt: skip
