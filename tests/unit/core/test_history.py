"""What a resumed learner would get back."""

from __future__ import annotations

from dataclasses import replace

from core_builders import a_group, a_stored_result, a_version

from echo2.core.group import Group
from echo2.core.history import TrainedHistory


def a_history(*, staleness_max: int = 1, kept: tuple[int, ...] = (0,)) -> TrainedHistory:
    history = TrainedHistory(staleness_max=staleness_max)
    history.kept = kept
    return history


def a_trained_group(index: int, *, step: int) -> Group:
    group = a_group(index)
    group.result = a_stored_result(a_version(step))
    return group


def test_what_was_trained_from_a_step_on_comes_back_in_order() -> None:
    history = a_history()
    for step in range(3):
        history.add(step, [a_trained_group(step, step=step)])
    assert [entry.group.id for entry in history.rewind(1)] == ["g1", "g2"]
    assert [entry.step for entry in history.trained] == [0]


def test_a_result_is_kept_while_a_kept_checkpoint_could_admit_it() -> None:
    history = a_history(staleness_max=1, kept=(2,))
    usable, too_new, too_old, none = (
        a_trained_group(0, step=1),
        a_trained_group(1, step=3),
        a_trained_group(2, step=0),
        a_group(3),
    )
    history.add(2, [usable, too_old, none])
    history.add(3, [too_new])
    assert [entry.has_result for entry in history.trained] == [True, False, False, False]
    assert usable.result is not None
    assert too_old.result is None
    assert too_new.result is None


def test_the_payload_of_a_trained_group_is_left_to_the_ledger() -> None:
    history, group = a_history(), a_trained_group(0, step=0)
    assert group.result is not None
    group.result = replace(group.result, payload="frames")
    history.add(0, [group])
    assert group.result is not None
    assert group.result.payload is None
    assert group.result.versions == {a_version(0)}


def test_a_result_trained_before_the_checkpoint_is_of_no_use_to_it() -> None:
    history = a_history(staleness_max=3, kept=(2,))
    history.add(1, [a_trained_group(0, step=1)])
    assert not history.trained[0].has_result


def test_new_checkpoints_forget_what_none_of_them_needs() -> None:
    history = a_history(staleness_max=1, kept=(0, 1))
    for step in range(3):
        history.add(step, [a_trained_group(step, step=step)])
    history.keep((1, 2))
    assert [entry.step for entry in history.trained] == [1, 2]
    assert (history.complete_from, history.oldest_kept) == (1, 1)
    history.keep((2,))
    assert [(e.step, e.has_result) for e in history.trained] == [(2, False)]


def test_a_result_is_dropped_when_the_checkpoint_that_needed_it_goes() -> None:
    history = a_history(staleness_max=1, kept=(1, 2))
    group = a_trained_group(0, step=1)
    history.add(4, [group])
    assert history.trained[0].has_result
    history.keep((3, 4))
    assert not history.trained[0].has_result
    assert group.result is None


def test_what_was_forgotten_once_stays_forgotten() -> None:
    history = a_history()
    history.keep((4,))
    history.keep((2,))
    assert history.complete_from == 4


def test_without_checkpoints_the_start_counts() -> None:
    assert a_history(kept=()).oldest_kept == 0
