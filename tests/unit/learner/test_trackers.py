"""TensorBoard and W&B get what metrics.jsonl gets, and stop nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from echo2.commands import extras
from echo2.config import config_from_mapping
from echo2.errors import ConfigError
from echo2_learner.trackers import Trackers

LINE = {"step": 3, "loss": 0.5, "tokens": 7, "eval_reward": None, "time": 1.0, "incarnation": 1}


def make(folder: Path, **table: Any) -> Trackers:
    return Trackers(
        config_from_mapping({"trackers": table, "http": {"token": "secret"}, "run": {"name": "n"}}),
        folder,
    )


def test_the_event_file_of_tensorboard_holds_every_number(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        tracked = make(tmp_path, tensorboard=True)
        tracked.begin(resume_step=resume_step, run_id="r")
        for step in steps:
            tracked.log({**LINE, "step": step, "loss": step + resume_step / 8})
        tracked.close()
    events = accumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "tokens"}
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.25)]


class Wandb(ModuleType):
    """The part of the package that is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]
        self.options: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.finished = False
        self.fails = False

    def init(self, **options: Any) -> Wandb:
        self.options = options
        return self  # the run has the same words here

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, float]) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_lines_and_the_settings_without_secrets(
    tmp_path: Path, wandb: Wandb
) -> None:
    tracked = make(tmp_path, wandb=True, wandb_project="p", wandb_mode="offline")
    tracked.begin(resume_step=0, run_id="r-1")
    tracked.log(LINE)
    tracked.close()
    assert wandb.logged == [{"step": 3, "loss": 0.5, "tokens": 7.0}]
    assert wandb.finished
    options = wandb.options
    assert (options["project"], options["name"], options["id"]) == ("p", "n", "r-1")
    assert (options["mode"], options["resume"], options["dir"]) == (
        "offline",
        "allow",
        str(tmp_path),
    )
    assert options["config"]["http"]["token"] == "hidden"


def test_a_tracker_that_fails_is_told_once_and_left_out(tmp_path: Path, wandb: Wandb) -> None:
    tracked = make(tmp_path, wandb=True)
    tracked.begin(resume_step=0, run_id="r")
    wandb.fails = True
    with capture_logs() as logs:
        tracked.log(LINE)
        tracked.log({**LINE, "step": 4})
        tracked.close()
    assert [entry["event"] for entry in logs] == ["tracker_lost"]
    assert "no network" in logs[0]["reason"]
    wandb.init = None  # type: ignore[assignment]
    with capture_logs() as logs:
        tracked.begin(resume_step=0, run_id="r")
        tracked.log(LINE)
    assert [entry["event"] for entry in logs] == ["tracker_lost"]


def test_a_package_that_is_missing_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        make(tmp_path, tensorboard=True, wandb=True)
    assert len(raised.value.problems) == 2
    assert 'pip install "echo2[wandb]"' in str(raised.value)
    make(tmp_path).begin(resume_step=0, run_id="r")
    assert list(tmp_path.iterdir()) == []
