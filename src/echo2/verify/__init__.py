"""Recomputes the promises of a run from its records alone.

`verify_run` reads config.resolved.toml, events.jsonl, metrics.jsonl, ledger.sqlite, ledger/,
checkpoints/ and versions/ with its own reading of them, and uses no rule of `echo2.core`: what the
coordinator decided is checked here by other code. One pass over the events; every check is
a class with a name, in `checks_*.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from echo2.errors import ConfigError
from echo2.verify.check import Check
from echo2.verify.checks_audits import audit_checks
from echo2.verify.checks_files import file_checks
from echo2.verify.checks_groups import group_checks
from echo2.verify.checks_ledger import ledger_checks
from echo2.verify.checks_metrics import metric_checks
from echo2.verify.checks_records import RecordsWhole, record_checks
from echo2.verify.checks_staleness import staleness_checks
from echo2.verify.checks_steps import step_checks
from echo2.verify.checks_weights import weight_checks
from echo2.verify.history import History, Settings
from echo2.verify.records import CONFIG_FILE, read_config
from echo2.verify.report import Promise, Report, Violation

__all__ = ["Promise", "Report", "Violation", "verify_run"]


def verify_run(run_dir: str | os.PathLike[str]) -> Report:
    """Check every promise of the run in `run_dir`; ConfigError when that is no run folder."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder of a run")
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} holds no {CONFIG_FILE}; name the folder of a run")
    tables, unreadable = read_config(folder / CONFIG_FILE)
    settings, problems = Settings.of(tables)
    history = History(settings, problems=[unreadable] if unreadable else problems)

    reader = RecordsWhole(folder, history, ())
    metrics = list(reader.metric_lines())
    kinds = (
        *record_checks(),
        *group_checks(),
        *staleness_checks(),
        *step_checks(),
        *metric_checks(),
        *weight_checks(),
        *file_checks(),
        *audit_checks(),
        *ledger_checks(),
    )
    checks: list[Check] = [kind(folder, history, metrics) for kind in kinds]
    for line in reader.events():
        for check in checks:
            check.read(line)
        history.apply(line)
    checks.insert(0, reader)
    for check in checks:
        check.conclude()
    return Report(
        run_dir=str(folder),
        promises=tuple(check.promise for check in checks),
        summary=_summary(history, metrics),
    )


def _summary(history: History, metrics: list[Any]) -> dict[str, Any]:
    if history.finished:
        end = f"finished: {history.end_reason}"
    else:
        end = f"did not finish: {history.end_reason or 'no run_finished event'}"
    return {
        "run_id": history.run_id,
        "end": end,
        "steps": history.v,
        "incarnations": len(history.resume_steps),
        "workers": len(history.precisions),
        "lines_of_metrics": len(metrics),
    }
