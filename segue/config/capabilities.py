"""What this build can do, as tables: the one place that knows, read by config check, session server, router, actors and
tests. Nothing here imports what it speaks of, so a configuration is refused before torch is loaded.

The first table says what a pause does to open turns, for each combination of mode, partial rollouts and R3; no other
place asks for the mode. Invariant: a combination that a configuration can spell either works or is refused when it is
read, with the remedy (segue.config.check).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from segue.config.schema import Rollout
from segue.events.engine import PauseMode

LOSSES: tuple[str, ...] = ("grpo",)
ADVANTAGES: tuple[str, ...] = ("group_centred", "group_normalised", "per_turn")
"""Names that the trainer's registries know; a test holds them equal."""

RECOMPUTED: tuple[str, ...] = ("mask_loss", "replay")
"""What trainers can do with rows that a prefill made again. "free_route" is not among them: a router replays a whole
micro-batch or none of it."""

MAX_MASK_TOKENS = 4096
"""Largest top_k whose kept sets an engine records."""


def truncates(rollout: Rollout) -> bool:
    """Whether training sessions sample from a cut distribution, so that each token's kept set is recorded."""
    return rollout.top_p < 1 or rollout.top_k != -1 or rollout.min_p > 0


MODES: tuple[PauseMode, ...] = ("abort", "retract", "retract_native", "in_place")


@dataclass(frozen=True, slots=True)
class Realisation:
    """How one combination is carried out.

    cut: the session servers take running requests off the engines by id and await what each had produced; otherwise
    requests stay with the engine, which carries them on by itself.
    drain: new turns wait and running ones get `rollout.drain_s` to end before they are cut.
    open_turns: what becomes of a turn that is open at the pause. "carried_on": its tokens so far stay, a new request
    goes on from them; "regenerated": they are dropped and the turn is generated again; "kept_by_engine".
    engine_pause: the engine's own mode that is used, recorded as `realised_as`. An engine emptied by cutting is
    paused with "retract", which is immediate; its own "abort" would look for running requests once a second.
    flush: the KV cache is dropped before weights change; otherwise KV of the old weights stays in use.
    releases_memory: weights and KV cache may leave the accelerator during the pause.
    rows: how R3 rows of an open turn come out. "exact": recorded when each token was fed, except where a partial came
    back without rows; "flagged": re-made by a later prefill and marked so; "none": R3 is off.
    """

    cut: bool
    drain: bool
    open_turns: Literal["carried_on", "regenerated", "kept_by_engine"]
    engine_pause: Literal["retract", "in_place"]
    flush: bool
    releases_memory: bool
    rows: Literal["exact", "flagged", "none"]
    warning: str = ""


RETRACT_NATIVE_R3 = (
    'rollout.pause_mode = "retract_native" with r3.enabled: the engine re-makes the route rows of open turns under new '
    'weights; they are marked and treated as r3.recomputed says. "retract" or "abort" keeps the exact rows'
)


def _realise(mode: PauseMode, *, partial: bool, r3: bool) -> Realisation:
    if mode == "abort" or (mode == "retract" and r3):
        return Realisation(
            cut=True,
            drain=not partial,
            open_turns="carried_on" if partial else "regenerated",
            engine_pause="retract",
            flush=True,
            releases_memory=True,
            rows="exact" if r3 else "none",
        )
    frozen = mode == "in_place"
    return Realisation(
        cut=False,
        drain=False,
        open_turns="kept_by_engine",
        engine_pause="in_place" if frozen else "retract",
        flush=not frozen,
        releases_memory=not frozen,
        rows="none" if not r3 else "exact" if frozen else "flagged",
        warning=RETRACT_NATIVE_R3 if r3 and not frozen else "",
    )


TABLE: dict[tuple[PauseMode, bool, bool], Realisation] = {
    (mode, partial, r3): _realise(mode, partial=partial, r3=r3)
    for mode, partial, r3 in product(MODES, (False, True), (False, True))
}
"""(mode, partial rollouts, R3) to its realisation. Every combination works; none is missing. Sampling masks do not
change a row of it: they come back with the tokens, and a partial that lost its mask counts as never sent."""


def realise(mode: PauseMode, *, partial: bool, r3: bool) -> Realisation:
    """How a pause in this mode is carried out."""
    return TABLE[mode, partial, r3]
