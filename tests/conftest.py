"""For all tests: how hypothesis runs. A slow machine is no failure of a property."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "echo2", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("echo2")
