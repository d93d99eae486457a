"""Records are read while they are written: whole lines only, what survives, what ended how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.commands.run import changes
from echo2.commands.run_records import RecordTail, read_ends, surviving_lines


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    with path.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(line if isinstance(line, str) else json.dumps(line) + "\n")
    return path


def test_a_tail_reads_each_whole_line_once_and_waits_for_a_half_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RecordTail(path)
    assert list(tail.read()) == []
    write(path, {"step": 1}, '{"step"')
    assert list(tail.read()) == [{"step": 1}]
    assert list(tail.read()) == []
    write(path, ": 2}\n", {"step": 3})
    assert list(tail.read()) == [{"step": 2}, {"step": 3}]


def test_a_tail_passes_over_a_torn_line_and_what_is_no_object(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", '{"step": 1, "rew\n', "[1]\n", {"step": 1})
    assert list(RecordTail(path).read()) == [{"step": 1}]


def test_a_tail_may_skip_what_an_earlier_life_wrote(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", {"step": 1})
    tail = RecordTail(path)
    tail.skip()
    write(path, {"step": 2})
    assert list(tail.read()) == [{"step": 2}]


def test_lines_after_the_checkpoint_that_was_resumed_do_not_survive(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        *({"step": step, "incarnation": 1} for step in (1, 2, 3, 4)),
        {"step": 3, "incarnation": 2},
        {"note": "no step"},
    )
    assert [(line["step"], line["incarnation"]) for line in surviving_lines(path)] == [
        (1, 1),
        (2, 1),
        (3, 2),
    ]


@pytest.mark.parametrize("since_end", [False, True])
def test_ends_of_groups_count_once_and_the_end_of_the_run_is_that_of_this_life(
    tmp_path: Path, since_end: bool
) -> None:
    path = write(
        tmp_path / "events.jsonl",
        {"event": "group_ended", "group_id": "g-1", "end": "trained"},
        {"event": "group_ended", "group_id": "g-2", "end": "expired"},
        {"event": "group_ended", "group_id": "g-3", "end": "trained"},
        {"event": "group_returned", "group_id": "g-3"},
        {"event": "group_returned", "group_id": "g-1"},
        {"event": "group_ended", "group_id": "g-1", "end": "failed"},
        {"event": "run_finished", "finished": False, "reason": "stopped"},
    )
    ends, finished = read_ends(path, since=path.stat().st_size if since_end else 0)
    assert ends == {"failed": 1, "expired": 1}
    assert finished.get("reason") == (None if since_end else "stopped")


def test_settings_that_changed_since_the_run_began_are_named() -> None:
    before = {"learner": {"steps": 100, "loss": {"clip_low": 0.2}}, "run": {"name": "a"}, "x": {}}
    now = {
        "learner": {"steps": 200, "loss": {"clip_low": 0.1}},
        "run": {"name": "a"},
        "x": {"b": 1},
    }
    assert changes(before, now) == [
        "learner.steps 100 -> 200",
        "learner.loss.clip_low 0.2 -> 0.1",
        "x.b None -> 1",
    ]
    assert changes(now, now) == []
