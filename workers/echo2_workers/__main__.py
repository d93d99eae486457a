"""`python -m echo2_workers CONFIG --run-dir RUN [--name NAME] [--set KEY=VALUE]...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from echo2.errors import ConfigError, Echo2Error
from echo2_workers.daemon import main


def _run() -> int:
    parser = argparse.ArgumentParser(prog="python -m echo2_workers", description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file of the run")
    parser.add_argument("--run-dir", type=Path, default=None, help="folder of the run")
    parser.add_argument("--name", default="", help="name in logs and records")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change one setting, e.g. worker.slots=4",
    )
    given = parser.parse_args()
    try:
        return main(given.config, given.run_dir, given.name, given.overrides)
    except Echo2Error as error:
        print(f"echo2: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(_run())
