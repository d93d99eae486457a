"""The machine that a benchmark ran on, for its JSON."""

from __future__ import annotations

import os
import platform


def this_machine() -> dict[str, object]:
    return {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
