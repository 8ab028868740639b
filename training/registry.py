"""Name -> factory tables whose factories import inside, so that listing the choices costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from segue.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Registry[**P, T]:
    """`kind` is the noun used in error messages, e.g. "loss"."""

    kind: str
    _factories: dict[str, Callable[P, T]] = field(default_factory=dict)

    def register(self, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorator; a name that is taken raises ConfigError."""

        def add(factory: Callable[P, T]) -> Callable[P, T]:
            if name in self._factories:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return add

    def create(self, name: str, *args: P.args, **kwargs: P.kwargs) -> T:
        """Build by name; an unknown name raises ConfigError listing the choices."""
        if name not in self._factories:
            raise ConfigError(f"unknown {self.kind} {name!r}; choices: {', '.join(self.names())}")
        return self._factories[name](*args, **kwargs)

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._factories))
