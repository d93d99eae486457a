"""Says, once per change, who waits for what: a wait that lasts, another cause of it, its end.

    a wait begins -> nothing for TELL_AFTER_S -> told -> its sentence differs -> told again, not
    more often than every TELL_EACH_S -> it is over -> told

What is over sooner is the normal life of a run, and is not told at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from echo2.core.waits import Wait

TELL_AFTER_S = 10.0
TELL_EACH_S = 10.0


@dataclass(slots=True)
class _Told:
    wait: Wait
    at: float


class Watchdog:
    """`look` at every tick. It keeps the waits that were told and are not over."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def look(self, waits: Iterable[Wait], now: float) -> Iterator[dict[str, Any]]:
        """The fields of `wait_changed` for each change."""
        found = {wait.key: wait for wait in waits}
        for key in [key for key in self._told if key not in found]:
            wait = self._told.pop(key).wait
            yield wait_fields(wait, now) | {"over": True, "ends_in_s": None}
        for key, wait in found.items():
            told = self._told.get(key)
            if told is None and now - wait.since < TELL_AFTER_S:
                continue
            if told is None or (told.wait.text != wait.text and now - told.at >= TELL_EACH_S):
                self._told[key] = _Told(wait, now)
                yield wait_fields(wait, now) | {"over": False}


def wait_fields(wait: Wait, now: float) -> dict[str, Any]:
    """A wait as plain values: `since_s` seconds old, over in `ends_in_s` at the latest."""
    return {
        "wait": wait.key,
        "owner": wait.owner,
        "text": wait.text,
        "since_s": round(now - wait.since, 3),
        "ends_in_s": None if wait.deadline is None else round(wait.deadline - now, 3),
        "then": wait.then,
    }
