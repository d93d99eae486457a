"""The whole loop over a session in memory that samples with what was published."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from echo2.cli import EXIT_OUT_OF_TASKS
from echo2.errors import ConfigError, FencedError, LearnerError, RunEndedError, WaitTimeoutError
from echo2.types import Version
from echo2_learner.main import run
from echo2_learner.parts import build
from echo2_learner.policy import Policy
from echo2_learner.stop import StopSignal

FIELDS = {
    *("step", "policy_version", "incarnation", "reward_mean", "staleness_mean", "staleness_max"),
    *("logprob_diff_mean", "logprob_diff_tokens", "mismatch_kl", "ess", "entropy"),
    *("clip_fraction", "grad_norm", "loss", "tokens", "tokens_per_s", "train_s", "wait_s"),
    *("bubble_ratio", "groups_trained", "groups_expired", "groups_failed", "eval_reward"),
    *("eval_version", "eval_num_done", "cost_usd", "workers_ready", "learning_rate"),
    *("publish_s", "time"),
}


class Bench:
    """Runs learners over one run folder."""

    def __init__(self, fake: ModuleType, folder: Path, run_dir: Path) -> None:
        self._fake, self._folder, self.run_dir = fake, folder, run_dir
        self._engine = Policy.load(folder)

    def __call__(
        self, *, resume: bool = False, incarnation: int = 1, tables: Any = None, **options: Any
    ) -> Any:
        """The session after the run; what the learner raised is in `.error`."""
        config = self._fake.make_config(self._folder, **(tables or {}))
        with StopSignal() as stop:
            parts = build(config, self.run_dir, resume=resume)
            session = self._fake.FakeSession(
                config,
                self.run_dir,
                Policy(copy.deepcopy(self._engine.module), self._folder),
                incarnation=incarnation,
                **options,
            )
            session.parts, session.error = parts, None
            try:
                session.code = run(parts, session, stop, again="echo2 learner ... --resume")
            except Exception as error:
                session.error = error
        return session

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def checkpoints(self) -> list[str]:
        folder = self.run_dir / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def bench(fake: ModuleType, tiny_folder: Path, run_dir: Path) -> Bench:
    return Bench(fake, tiny_folder, run_dir)


def at(name: str, step: int, error: Exception | int) -> Callable[[str, int], None]:
    """Raise an error, or send a signal, at one call."""

    def on_call(called: str, called_step: int) -> None:
        if (called, called_step) != (name, step):
            return
        if isinstance(error, Exception):
            raise error
        os.kill(os.getpid(), error)

    return on_call


def test_a_run_does_everything_in_its_order(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    session = bench()
    assert session.error is None
    assert session.code == 0
    assert session.calls == [
        ("start", 0),
        *[("publish", 0), ("evaluate", 0), ("wait_eval", 0)],
        *[("next_batch", 0), ("complete", 0), ("publish", 1)],
        *[("next_batch", 1), ("complete", 1), ("publish", 2), ("evaluate", 2)],
        ("checkpoint_saved", 2),
        *[("next_batch", 2), ("complete", 2), ("publish", 3)],
        *[("next_batch", 3), ("complete", 3), ("publish", 4), ("evaluate", 4), ("wait_eval", 4)],
        *[("checkpoint_saved", 4), ("close", -1)],
    ]
    assert session.closed == ("all steps are done", True)
    assert session.kept == [2, 4]
    assert session.published[-1].final
    assert "finished; the final weights are in" in capsys.readouterr().out
    final, learned = Policy.load(bench.run_dir / "final"), session.parts.policy
    for name, tensor in learned.tensors().items():
        assert torch.equal(final.tensors()[name], tensor)
    assert "waits for the batch of step 2" in session.said


def test_every_step_has_a_line_with_all_fields(bench: Bench) -> None:
    learner = {"steps": 5, "logprob_check_every_steps": 2, "groups_per_step": 20}
    bench(tables={"learner": learner, "dispatch": {"group_size": 18}})
    lines = bench.lines
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["policy_version"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines:
        assert line.keys() >= FIELDS
        assert line["incarnation"] == 1
        assert line["groups_trained"] == 20
        assert line["tokens"] == 20 * 18 * 3
        assert line["staleness_max"] == 0
        assert line["mismatch_kl"] < 1e-9
        assert line["ess"] == pytest.approx(1.0, abs=1e-6)
        assert 0 <= line["bubble_ratio"] <= 1
        assert 0 < line["reward_mean"] < 1
        assert (line["workers_ready"], line["cost_usd"]) == (2, 0.5)
    checked = [line["logprob_diff_mean"] is not None for line in lines]
    assert checked == [True, False, True, False, True]
    assert all(line["logprob_diff_mean"] < 1e-5 for line in lines[::2])
    assert all(line["logprob_diff_tokens"] >= 1000 for line in lines[::2])


def test_the_first_line_tells_the_first_eval_and_the_last_line_the_last(bench: Bench) -> None:
    bench(tables={"learner": {"steps": 6}, "eval": {"every_steps": 2, "num_tasks": 8}})
    told = [(line["eval_version"], line["eval_reward"]) for line in bench.lines]
    assert told == [(0, 0.0), (2, 0.02), (None, None), (4, 0.04), (None, None), (6, 0.06)]
    assert [line["eval_num_done"] for line in bench.lines][:3] == [8, 8, None]


def test_without_evals_nobody_is_asked(bench: Bench) -> None:
    session = bench(tables={"eval": {"every_steps": 0}})
    assert not [name for name, _ in session.calls if "eval" in name]
    assert all(line["eval_reward"] is None for line in bench.lines)


def test_an_eval_that_misses_its_deadline_does_not_stop_the_run(bench: Bench) -> None:
    session = bench(on_call=at("wait_eval", 0, WaitTimeoutError("8 of 8 evals are missing")))
    assert session.error is None
    assert session.closed == ("all steps are done", True)


@pytest.mark.parametrize("period", [2, 3])
def test_versions_are_published_every_period_and_at_the_end(bench: Bench, period: int) -> None:
    session = bench(tables={"learner": {"steps": 7}, "staleness": {"max": 3, "period": period}})
    steps = [step for name, step in session.calls if name == "publish"]
    assert steps == sorted({*range(0, 7, period), 7})
    stale = [line["staleness_max"] for line in bench.lines]
    assert stale == [step % period for step in range(7)]
    evals = [step for name, step in session.calls if name == "evaluate"]
    assert set(evals) <= set(steps)
    assert evals[-1] == 7


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    bench: Bench, fake: ModuleType, tiny_folder: Path, tmp_path: Path, run_dir: Path
) -> None:
    """Resumed from step 2 after dying in step 3: the same weights as without the death."""
    other = tmp_path / "straight"
    other.mkdir()
    (other / "origin.json").write_bytes((run_dir / "origin.json").read_bytes())
    straight = Bench(fake, tiny_folder, other)()
    died = bench(on_call=at("complete", 3, LearnerError("killed")))
    assert isinstance(died.error, LearnerError)
    assert bench.checkpoints == ["step-00000002-i1"]
    resumed = bench(resume=True, incarnation=2)
    assert resumed.error is None
    assert resumed.calls[:3] == [("start", 2), ("publish", 2), ("next_batch", 2)]
    steps = [(line["incarnation"], line["step"]) for line in bench.lines]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]
    assert resumed.parts.lineage.starts == [(1, 0), (2, 2)]
    assert Version(1, 3) not in resumed.parts.publisher.versions
    assert resumed.parts.groups_trained == 16
    assert resumed.parts.next_task_index == 16
    for name, tensor in straight.parts.policy.tensors().items():
        assert torch.equal(resumed.parts.policy.tensors()[name], tensor)


def test_a_second_start_in_the_same_folder_must_say_resume(bench: Bench) -> None:
    bench(tables={"learner": {"steps": 2}})
    with pytest.raises(ConfigError, match="go on with --resume, or choose another --run-dir"):
        bench()


def test_resume_without_a_checkpoint_starts_at_the_beginning(bench: Bench) -> None:
    bench(on_call=at("complete", 0, LearnerError("killed")))
    session = bench(resume=True, incarnation=2)
    assert session.calls[0] == ("start", 0)
    assert [line["step"] for line in bench.lines] == [1, 2, 3, 4]


def test_a_finished_run_that_is_resumed_only_finishes_again(bench: Bench) -> None:
    bench()
    lines = bench.lines
    session = bench(resume=True, incarnation=2)
    assert session.calls == [("start", 4), ("close", -1)]
    assert session.closed == ("all steps are done", True)
    assert bench.lines == lines


@pytest.mark.parametrize("call", [("complete", 2), ("publish", 3), ("next_batch", 2)])
def test_a_fenced_learner_writes_nothing_more(bench: Bench, call: tuple[str, int]) -> None:
    session = bench(on_call=at(*call, FencedError("incarnation 2 took over")))
    assert isinstance(session.error, FencedError)
    assert session.closed is not None
    assert [line["step"] for line in bench.lines] == [1, 2]
    assert bench.checkpoints == ["step-00000002-i1"]
    assert not (bench.run_dir / "final").exists()


def test_a_learner_that_wakes_up_after_another_took_over_changes_no_file(bench: Bench) -> None:
    """As after SIGSTOP: nobody told it yet, but the run folder has a new owner."""

    def taken_over(name: str, step: int) -> None:
        if (name, step) == ("complete", 2):
            owner = json.dumps({"incarnation": 2, "pid": 1})
            (bench.run_dir / "learner.json").write_text(owner)

    session = bench(on_call=taken_over)
    assert isinstance(session.error, FencedError)
    assert [line["step"] for line in bench.lines] == [1, 2]
    assert [message.version.step for message in session.published] == [0, 1, 2]
    assert bench.checkpoints == ["step-00000002-i1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_writes_a_checkpoint_and_says_how_to_go_on(
    bench: Bench, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    session = bench(on_call=at("complete", 2, number))
    assert session.error is None
    assert session.code == 0
    assert session.calls[-3:] == [("publish", 3), ("checkpoint_saved", 3), ("close", -1)]
    assert session.closed == (f"stopped by {signal.Signals(number).name}", False)
    assert [line["step"] for line in bench.lines] == [1, 2, 3]
    assert "go on with: echo2 learner ... --resume" in capsys.readouterr().out
    assert not (bench.run_dir / "final").exists()
    assert bench(resume=True, incarnation=2).calls[0] == ("start", 3)
    assert [line["step"] for line in bench.lines] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("call", "checkpoint"),
    [
        (("next_batch", 3), ["step-00000002-i1", "step-00000003-i1"]),
        (("wait_eval", 0), ["step-00000000-i1"]),
        (("start", 0), []),
    ],
)
def test_a_signal_ends_a_wait_at_once(
    bench: Bench, call: tuple[str, int], checkpoint: list[str]
) -> None:
    session = bench(on_call=at(*call, signal.SIGTERM))
    assert session.code == 0
    assert session.closed is not None
    assert session.closed[1] is False
    assert bench.checkpoints == checkpoint
    assert not [name for name, _ in session.calls if name == "complete"][3:]


def test_a_coordinator_that_is_gone_does_not_hold_a_learner_that_is_told_to_stop(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def never_answers(name: str, step: int) -> None:
        if (name, step) == ("complete", 3):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)

    session = bench(on_call=never_answers, tables={"heartbeat": {"gone_s": 0.05}})
    assert session.code == 0
    assert session.closed == ("stopped by SIGTERM", False)
    # The step is on record nowhere, so it is in no checkpoint.
    assert bench.checkpoints == ["step-00000002-i1"]
    assert [line["step"] for line in bench.lines] == [1, 2, 3]
    assert "newest checkpoint: step 2" in capsys.readouterr().out


def test_a_signal_during_the_last_eval_still_records_the_step(bench: Bench) -> None:
    session = bench(on_call=at("wait_eval", 4, signal.SIGTERM))
    assert session.closed == ("stopped by SIGTERM", False)
    assert [line["step"] for line in bench.lines] == [1, 2, 3, 4]
    assert bench.checkpoints[-1] == "step-00000004-i1"
    again = bench(resume=True, incarnation=2)
    assert again.closed == ("all steps are done", True)


@pytest.mark.parametrize("finished", [True, False])
def test_when_the_coordinator_ends_the_checkpoint_is_written_first(
    bench: Bench, finished: bool
) -> None:
    ended = RunEndedError("the coordinator ended: $5 are spent", finished=finished)
    session = bench(on_call=at("next_batch", 3, ended))
    assert bench.checkpoints == ["step-00000002-i1", "step-00000003-i1"]
    assert (bench.run_dir / "final").exists() is finished
    assert session.error is (None if finished else ended)
    assert ("checkpoint_saved", 3) not in session.calls


def test_a_step_that_was_not_recorded_is_in_no_checkpoint(bench: Bench) -> None:
    ended = RunEndedError("the coordinator ended", finished=False)
    bench(on_call=at("complete", 2, ended))
    assert bench.checkpoints == ["step-00000002-i1"]


@pytest.mark.parametrize("tell_last", [True, False])
def test_the_end_of_the_data_ends_the_run(bench: Bench, tell_last: bool) -> None:
    session = bench(data_ends_at=3, tell_last=tell_last)
    assert session.closed is not None
    reason, finished = session.closed
    assert reason.startswith(f"the tasks are used up: 3 of {3 + session.missing_steps} steps")
    assert finished
    assert session.missing_steps > 0
    assert session.code == EXIT_OUT_OF_TASKS
    assert [line["step"] for line in bench.lines] == [1, 2, 3]
    assert bench.checkpoints[-1] == "step-00000003-i1"
    assert ("wait_eval", 3) in session.calls
    assert (bench.lines[-1]["eval_version"] == 3) is tell_last


def test_a_coordinator_at_another_step_is_an_error(bench: Bench, fake: ModuleType) -> None:
    bench(tables={"learner": {"steps": 2}})
    start = fake.FakeSession.start

    class Elsewhere(fake.FakeSession):  # type: ignore[misc, name-defined]
        def start(self, *, resume_step: int, **options: Any) -> Any:
            return start(self, resume_step=7, **options)

    bench._fake = type("Module", (), {"make_config": fake.make_config, "FakeSession": Elsewhere})
    session = bench(resume=True, incarnation=2)
    assert isinstance(session.error, LearnerError)
    assert "the coordinator is at step 7" in str(session.error)


@pytest.fixture(autouse=True)
def _signals_are_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
