"""The stream of tasks for the session, and the held-out ones for evals."""

from __future__ import annotations

from typing import Any

import pytest

from echo2.errors import ConfigError, EnvironmentError_
from echo2_learner import tasks as tasks_module
from echo2_learner.tasks import Tasks


class Listed:
    """An environment of `train` training tasks and three held-out ones."""

    name, version = "listed", "1"

    def __init__(self, train: int | None = None, payload: Any = None) -> None:
        self._train = train
        self._payload = payload

    def num_tasks(self, split: str) -> int | None:
        return self._train if split == "train" else 3

    def task(self, split: str, index: int) -> Any:
        return self._payload if self._payload is not None else f'"{split} {index}"'

    async def rollout(self, task: Any, generate: Any) -> Any:
        raise NotImplementedError


def test_an_endless_stream_never_ends() -> None:
    found, exhausted = Tasks(Listed()).train(1_000_000, 3)
    assert [task.index for task in found] == [1_000_000, 1_000_001, 1_000_002]
    assert found[0].payload == '"train 1000000"'
    assert not exhausted


@pytest.mark.parametrize(
    ("start", "count", "indexes", "exhausted"),
    [(0, 3, [0, 1, 2], False), (3, 2, [3, 4], True), (3, 9, [3, 4], True), (5, 4, [], True)],
)
def test_a_finite_data_set_is_read_once(
    start: int, count: int, indexes: list[int], exhausted: bool
) -> None:
    found, is_exhausted = Tasks(Listed(train=5)).train(start, count)
    assert [task.index for task in found] == indexes
    assert is_exhausted is exhausted


def test_big_tasks_come_in_smaller_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "REPLY_BYTES_MAX", 100)
    stream = Tasks(Listed(train=4, payload="x" * 60))
    assert [task.index for task in stream.train(0, 4)[0]] == [0]
    assert stream.train(0, 4)[1] is False
    assert stream.train(3, 4)[1] is True


def test_evals_are_the_first_held_out_tasks() -> None:
    assert [task.payload for task in Tasks(Listed()).evals(2)] == ['"eval 0"', '"eval 1"']
    assert len(Tasks(Listed()).evals(100)) == 3


def test_evals_that_no_message_can_hold_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"hold \d+ bytes, .* set it to 2 or less"):
        Tasks(Listed(payload="x" * 2**20)).evals(3)


@pytest.mark.parametrize(
    ("payload", "said"),
    [(5, "is int; a task is text"), ("x" * (2**20 + 1), "str of 1048577 bytes")],
)
def test_what_is_no_task_is_the_environments_fault(payload: Any, said: str) -> None:
    with pytest.raises(EnvironmentError_, match=said):
        Tasks(Listed(payload=payload)).train(0, 1)


def test_a_failing_environment_is_named_with_its_error() -> None:
    class Failing(Listed):
        def task(self, split: str, index: int) -> Any:
            raise KeyError("column")

    with pytest.raises(EnvironmentError_, match=r"listed failed at task\('train', 7\): KeyError"):
        Tasks(Failing()).train(7, 1)
