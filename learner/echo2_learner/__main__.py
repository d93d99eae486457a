"""`python -m echo2_learner CONFIG [--run-dir RUN] [--resume] [--set key=value]...`"""

from __future__ import annotations

import argparse
import sys

from echo2.config import load_config
from echo2.errors import ConfigError, Echo2Error, FencedError
from echo2.logs import setup_logging
from echo2_learner.main import main

EXIT_FAILED, EXIT_CONFIG, EXIT_FENCED, EXIT_INTERRUPTED = 1, 2, 3, 130


def _run() -> int:
    parser = argparse.ArgumentParser(prog="python -m echo2_learner", description=__doc__)
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--run-dir", help="run folder; by default run.dir/run.name")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    try:
        log = load_config(options.config, options.overrides).log
        setup_logging(log.level, log.format)
        return main(options.config, options.run_dir, options.resume, options.overrides)
    except ConfigError as error:
        return _failed(error, EXIT_CONFIG)
    except FencedError as error:
        return _failed(error, EXIT_FENCED)
    except Echo2Error as error:
        return _failed(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _failed("interrupted", EXIT_INTERRUPTED)


def _failed(said: object, code: int) -> int:
    print(f"echo2: {said}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(_run())
