"""Names of things: event ids and fresh fixed-length identifiers."""

from __future__ import annotations

import secrets

import msgspec


class EventId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identity of one event: unique and contiguous per (run, producer, epoch)."""

    run: str
    producer: str
    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.run}/{self.producer}/{self.epoch}/{self.seq}"


def fresh_id(prefix: str) -> str:
    """`<prefix>-` and 24 hex digits. Fixed length: engines match request ids by prefix, so no id may start another."""
    return f"{prefix}-{secrets.token_hex(12)}"
