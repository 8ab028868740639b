"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Wall-clock limits per example fail on a busy machine and prove nothing; each test has pytest's own timeout.
settings.register_profile("segue", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("segue")
