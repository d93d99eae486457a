"""For all tests: how hypothesis runs. A slow machine is no failure of a property.

The examples are the same in each run of the same code, so that a change fails for what it changed.
`pytest tests/property --hypothesis-profile search` looks at others each time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

slow_machines = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("echo2", slow_machines, derandomize=True, database=None)
settings.register_profile("search", slow_machines)
settings.load_profile("echo2")
