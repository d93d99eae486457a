"""TensorBoard and Weights & Biases beside metrics.jsonl.

Promise: a package that is missing is told before the run starts, and a tracker that fails
later is told once and left out; it never stops training. Both get every number of a metrics'
line, at its `step`. A resumed run goes on in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from echo2.commands.extras import need_trackers
from echo2.config import Config

log = structlog.get_logger(__name__)

LOGIN_TIMEOUT_S: Final = 30
"""W&B asks for a key at a terminal when it has none, and waits for it."""
NOT_NUMBERS: Final = ("step", "policy_version", "incarnation", "time")
"""Fields of a line that say which one it is."""


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard; lines above the step that is resumed are purged."""

    def __init__(self, run_dir: Path, *, resume_step: int) -> None:
        tensorboard = import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run for a run folder; its id is the run's, so that a resumed one goes on."""

    def __init__(self, config: Config, run_dir: Path, *, run_id: str) -> None:
        table = config.trackers
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=table.wandb_project,
            name=config.run.name,
            id=run_id or None,
            resume="allow",
            mode=table.wandb_mode,
            dir=str(run_dir),
            config=without_secrets(config),
            settings={"login_timeout": LOGIN_TIMEOUT_S},
        )
        # Steps of a run that was set back come again; W&B's own counter may only grow.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Those that the configuration names; none of them can stop the learner."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        need_trackers(config.trackers)
        self._config = config
        self._run_dir = run_dir
        self._open: dict[str, Tracker] = {}

    def begin(self, *, resume_step: int, run_id: str) -> None:
        table = self._config.trackers
        if table.tensorboard:
            self._start("tensorboard", lambda: TensorBoard(self._run_dir, resume_step=resume_step))
        if table.wandb:
            self._start(
                "wandb", lambda: WeightsAndBiases(self._config, self._run_dir, run_id=run_id)
            )

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; what is no number is left out."""
        values = {
            name: float(value)
            for name, value in line.items()
            if name not in NOT_NUMBERS and isinstance(value, int | float)
        }
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(int(line["step"]), values)
            except Exception as error:  # of a foreign library, whatever it is
                self._lost(name, error)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            try:
                tracker.close()
            except Exception as error:  # of a foreign library too
                self._lost(name, error)
        self._open.clear()

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._open[name] = make()
        except Exception as error:  # of a foreign library too
            self._lost(name, error)

    def _lost(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        log.warning(
            "tracker_lost",
            tracker=name,
            reason=f"{type(error).__name__}: {error}",
            advice="training goes on; all numbers are in metrics.jsonl",
        )


def without_secrets(config: Config) -> dict[str, Any]:
    """All settings, but for the HTTP token."""
    shown = config.model_dump()
    shown["http"]["token"] = "hidden" if config.http.token else ""
    return shown
