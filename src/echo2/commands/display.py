"""How `echo2 run` shows itself: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo2.commands.run_view import LASTING_S, RunView, number, told_ends, told_wait

PLAIN_LINES = 20
"""Plain lines of a whole run, besides those with an eval."""


class Display(Protocol):
    def update(self, view: RunView) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_display(console: Console | None = None) -> Display:
    console = console or Console(highlight=False)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()


class PlainDisplay:
    """A line every few steps and at every eval, and one of each wait that lasts, once per change;
    what is said comes at once."""

    def __init__(self) -> None:
        self._shown_step = -1
        self._shown_eval = ""
        self._waits: dict[str, tuple[str, float]] = {}

    def update(self, view: RunView) -> None:
        self._tell_waits(view)
        due = view.line and view.step - max(0, self._shown_step) >= max(
            1, view.steps // PLAIN_LINES
        )
        if due or view.evaluation != self._shown_eval or (self._shown_step < 0 and view.line):
            if view.line or view.evaluated:
                print(view.plain_line(), flush=True)
                self._shown_step = view.step
            self._shown_eval = view.evaluation

    def _tell_waits(self, view: RunView) -> None:
        """On change, and of one wait not more often than another begins to last."""
        found = {str(wait.get("wait")): wait for wait in view.lasting_waits}
        self._waits = {key: told for key, told in self._waits.items() if key in found}
        now = time.monotonic()
        for key, wait in found.items():
            text, at = self._waits.get(key, ("", -math.inf))
            if text != wait.get("text") and now - at >= LASTING_S:
                self._waits[key] = str(wait.get("text")), now
                print(f"waits: {told_wait(wait)}", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class LiveDisplay:
    """The table is redrawn in place; what is said scrolls above it."""

    def __init__(self, console: Console) -> None:
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def update(self, view: RunView) -> None:
        self._live.update(table_of(view, time.monotonic() - self._started), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()


def table_of(view: RunView, elapsed_s: float) -> RenderableType:
    """The whole picture: progress, figures, workers, what is waited for."""
    bubble = view.line.get("bubble_ratio")
    figures = {
        "version": view.version,
        "reward": number(view.line.get("reward_mean")),
        "eval": view.evaluation,
        "staleness": view.staleness,
        "tokens/s": view.tokens_per_s,
        "bubble": "-" if bubble is None else f"{bubble:.0%}",
        "buffer": f"{view.buffered} groups",
        "leases": number(view.status.get("leases")),
        "cost": view.cost,
        "groups": told_ends(view.status.get("groups") or {}),
        "learner": str((view.status.get("learner") or {}).get("state") or "-"),
    }
    return Group(
        _progress(view, elapsed_s),
        _figures(figures),
        _workers(view),
        *(Text(f"waits: {text}", style="yellow") for text in _waits(view)),
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _progress(view: RunView, elapsed_s: float) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text(view.name, style="bold"),
        ProgressBar(total=view.steps, completed=view.step, width=32),
        f"step {view.step}/{view.steps}",
        duration(elapsed_s),
    )
    return row


def _figures(figures: dict[str, str]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    pairs = list(figures.items())
    for start in range(0, len(pairs), 3):
        cells: list[Text] = []
        for name, value in pairs[start : start + 3]:
            cells += [Text(name, style="dim"), Text(value)]
        grid.add_row(*cells)
    return grid


def _workers(view: RunView) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("worker", "state", "version", "leases", "tokens/s", "Δlogprob", "silent"):
        table.add_column(column)
    for worker in view.workers:
        table.add_row(
            str(worker.get("name", "-")),
            str(worker.get("state", "-")),
            str(worker.get("version") or "-"),
            f"{number(worker.get('leases'))}/{number(worker.get('slots'))}",
            number(worker.get("tokens_per_s")),
            number(worker.get("mismatch")),
            f"{number(worker.get('silent_s'))} s",
        )
    return table


def _waits(view: RunView) -> Sequence[str]:
    return [told_wait(wait) for wait in view.status.get("waits") or []][:4]
