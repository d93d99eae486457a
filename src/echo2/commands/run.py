"""`echo2 run`: the whole system on this machine, as real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.commands.check import without_secrets
from echo2.commands.display import make_display
from echo2.commands.extras import need_extras, need_trackers
from echo2.commands.local_run import LocalRun
from echo2.commands.run_folder import RunFolder
from echo2.config import Config, load_config
from echo2.errors import ConfigError, Echo2Error


def main(path: Path, run_dir: Path | None, overrides: list[str], *, resume: bool) -> int:
    config = load_config(path, overrides)
    if not config.workers.local:
        raise ConfigError(
            "workers.local = 0: echo2 run starts the workers of this machine; give at least 1, "
            "or start the daemons by hand (echo2 coordinator, learner, worker)",
            source=str(path),
        )
    folder = RunFolder.of(config, run_dir)
    if folder.is_used() and not resume:
        raise Echo2Error(
            f"{folder.path} holds a run already: go on with it by --resume, or give another "
            "--run-dir, or remove it"
        )
    if resume and not folder.resolved_config.exists():
        raise Echo2Error(f"{folder.path} holds no run to go on with; leave out --resume")
    need_extras("learner")
    need_trackers(config.trackers)
    if config.worker.engine == "transformers":
        need_extras("worker")
    folder.make()
    with folder.locked():
        return _run(config, folder, path, resume=resume)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, as "learner.steps 100 -> 200"."""
    found = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} {old} -> {new}")
    return found


def _run(config: Config, folder: RunFolder, path: Path, *, resume: bool) -> int:
    if resume and folder.resolved_config.exists():
        before = without_secrets(load_config(folder.resolved_config))
        changed = changes(before.model_dump(), without_secrets(config).model_dump())
        if changed:
            print(f"changed since the run began: {', '.join(changed)}", flush=True)
    folder.prepare(config)
    workers = [f"{config.worker.name or 'w'}-{i}" for i in range(1, config.workers.local + 1)]
    display = make_display()
    try:
        local = LocalRun(
            config, folder, workers, display, resume=resume, import_path=path.absolute().parent
        )
        code = asyncio.run(local.run())
    finally:
        display.close()
    for line in local.summary(str(path)):
        print(line, flush=True)
    return code
