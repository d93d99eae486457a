"""`echo2 verify`: recomputes the promises from a run's records."""

from __future__ import annotations

import json
from pathlib import Path

from echo2.verify import verify_run


def main(run_dir: Path, *, as_json: bool) -> int:
    """0 only if no promise is broken."""
    report = verify_run(run_dir)
    print(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    return 0 if report.ok else 1
