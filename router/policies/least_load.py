"""The engine with the least load; of equals the one with the first id."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import Candidate


class LeastLoad:
    def choose(self, candidates: Sequence[Candidate]) -> str:
        return min(candidates, key=lambda candidate: candidate.load).engine_id
