"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Wall-clock limits per example fail on a busy machine and prove nothing; each test has pytest's own timeout.
settings.register_profile("segue", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("segue")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("segue", "how thorough the trials are (make chaos, make soak)")
    group.addoption("--every-event", action="store_true", help="kill every part at every event of the simulated run")
    group.addoption("--simulated-hours", type=float, default=3.0, help="how long the simulated day is")
    group.addoption("--simulated-seeds", type=int, default=1, help="how many days, each with another seed, are played")
