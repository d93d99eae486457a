"""What is shown of a run: every figure, and "-" for what is not known."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from echo2.commands.display import PlainDisplay, duration, make_display, table_of
from echo2.commands.run_view import RunView, number
from echo2.commands.status import told

STATUS: dict[str, Any] = {
    "run_id": "r-1",
    "step": 41,
    "incarnation": 1,
    "state": "running",
    "learner": {"name": "learner", "state": "training step 41", "silent_s": 0.2},
    "workers": [
        {
            "name": "w-1",
            "state": "ready",
            "engine": "transformers",
            "version": "1.41",
            "slots": 16,
            "leases": 9,
            "tokens_per_s": 1234.5,
            "mismatch": 4e-7,
            "price_usd_per_h": 0.05,
            "silent_s": 0.4,
        }
    ],
    "buffer": {"total": 12, "by_version": {"1.40": 4, "1.41": 8}},
    "leases": 9,
    "groups": {"trained": 1312, "expired": 0, "failed": 2, "filtered": 0, "cancelled": 0},
    "versions": {"published": "1.41", "digest": "ab" * 32},
    "waits": [
        {
            "wait": "batch",
            "owner": "coordinator",
            "text": "step 41 waits for groups: 12 of 32 admissible",
            "since_s": 3.0,
            "ends_in_s": 57.0,
            "then": "its lease on w-1 is given to another",
        }
    ],
    "cost_usd": 0.0123,
    "tokens_per_s": 1234.5,
    "loop_lag_s": 0.001,
    "refused": {"stale": 3},
}


def a_view(**line: Any) -> RunView:
    view = RunView("quickstart", 200)
    view.take_line(
        {
            "step": 40,
            "reward_mean": 0.5125,
            "eval_reward": 0.625,
            "eval_version": 40,
            "staleness_mean": 0.75,
            "staleness_max": 2,
            "bubble_ratio": 0.125,
            **line,
        }
    )
    view.status = STATUS
    return view


def drawn(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of(view, 75.0))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_shows_every_figure() -> None:
    text = drawn(a_view())
    for figure in (
        "step 41/200", "1:15", "1.41", "0.512", "0.625 @ v40", "0.75 mean, 2 max", "1,234", "12%",
        "12 groups", "$0.0123", "1312 trained, 2 failed", "training step 41", "w-1", "9/16",
        "4e-07", "waits: step 41 waits for groups: 12 of 32 admissible",
    ):  # fmt: skip
        assert figure in text


def test_a_table_of_nothing_is_drawn_too() -> None:
    assert "step 0/200" in drawn(RunView("quickstart", 200))


def test_the_newest_eval_stays_when_later_lines_hold_none() -> None:
    view = a_view()
    view.take_line({"step": 41, "eval_reward": None})
    assert view.evaluation == "0.625 @ v40"


def test_a_plain_display_prints_every_tenth_step_every_eval_and_what_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = PlainDisplay()
    view = RunView("quickstart", 200)
    display.update(view)
    for step in range(1, 36):
        view.take_line({"step": step, "eval_reward": 0.5 if step == 25 else None})
        display.update(view)
        display.update(view)
    display.say("w-1 ended")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:-1]] == [
        "1/200",
        "11/200",
        "21/200",
        "25/200",
        "35/200",
    ]
    assert printed[-1] == "w-1 ended"


def test_only_a_terminal_gets_a_live_table() -> None:
    assert isinstance(make_display(Console(file=io.StringIO())), PlainDisplay)


def test_the_status_is_told_in_lines() -> None:
    text = "\n".join(told(STATUS))
    for figure in (
        "r-1  running", "step      41  incarnation 1", "1.41  abababababababab",
        "training step 41  silent 0.2 s", "12 groups (4 of 1.40, 8 of 1.41)",
        "1312 trained, 2 failed",
        "1,234 tokens/s", "$0.0123", "refused   3 stale", "waits     step 41 waits for groups",
        "worker    w-1  ready  version 1.41  9/16 leases",
    ):  # fmt: skip
        assert figure in text
    assert any("not connected" in line for line in told({}))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (True, "-"),
        ("x", "-"),
        (0, "0"),
        (12345, "12,345"),
        (1234.5, "1,234"),
        (0.51249, "0.512"),
    ],
)
def test_numbers_have_three_digits(value: object, shown: str) -> None:
    assert number(value) == shown


def test_durations_are_minutes_or_hours() -> None:
    assert [duration(s) for s in (5, 65, 3665)] == ["0:05", "1:05", "1:01:05"]


def test_a_plain_display_tells_of_a_wait_that_lasts_once_per_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    display, view = PlainDisplay(), RunView("quickstart", 200)
    wait = {"wait": "learner", "owner": "coordinator", "text": "no learner", "then": "it ends"}

    def shown(text: str, since_s: float) -> list[str]:
        view.status = {"waits": [wait | {"text": text, "since_s": since_s, "ends_in_s": 5.0}]}
        display.update(view)
        clock[0] += 1.0
        return capsys.readouterr().out.splitlines()

    assert shown("no learner", 9.0) == []
    assert shown("no learner", 10.0) == [
        "waits: no learner, since 10 s  (coordinator: it ends in 5 s)"
    ]
    assert shown("no learner", 11.0) == []
    assert shown("it is silent", 12.0) == [], "not so soon"
    clock[0] += 10.0
    assert len(shown("it is silent", 22.0)) == 1
    view.status = {}
    display.update(view)
    assert len(shown("no learner", 10.0)) == 1, "another one"
