"""Which of several admitted, healthy engines gets the next session. One policy is one file.

A policy only ever sees engines that may be used: affinity, health and weight version are settled before it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may be chosen. `load`: sessions assigned to it plus requests of plain clients in flight."""

    engine_id: str
    load: int


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate]) -> str:
        """Engine id of one of `candidates`, of which there is at least one, in the order of their ids."""
        ...


_FACTORIES: dict[str, Callable[[], Policy]] = {}


def _register(name: str) -> Callable[[Callable[[], Policy]], Callable[[], Policy]]:
    def register(factory: Callable[[], Policy]) -> Callable[[], Policy]:
        if name in _FACTORIES:
            raise ValueError(f"routing policy '{name}' is registered twice")
        _FACTORIES[name] = factory
        return factory

    return register


@_register("least_load")
def _least_load() -> Policy:
    from router.policies.least_load import LeastLoad

    return LeastLoad()


@_register("round_robin")
def _round_robin() -> Policy:
    from router.policies.round_robin import RoundRobin

    return RoundRobin()


def names() -> list[str]:
    return sorted(_FACTORIES)


def create(name: str) -> Policy:
    """A fresh policy of this name; an unknown one raises ConfigError listing the choices."""
    if name not in _FACTORIES:
        raise ConfigError(f"router.policy: there is no '{name}'; choose one of {', '.join(names())}")
    return _FACTORIES[name]()
