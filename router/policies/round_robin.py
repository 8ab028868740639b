"""Engines in turn, in the order of their ids, whatever their load."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import Candidate


class RoundRobin:
    """Remembers the last choice by id, so that engines may come and go between two choices."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate]) -> str:
        later = [candidate.engine_id for candidate in candidates if candidate.engine_id > self._last]
        self._last = later[0] if later else candidates[0].engine_id
        return self._last
