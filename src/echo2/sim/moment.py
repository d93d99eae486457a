"""The moment that is being checked: the books, the event under way, what is durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from echo2.core.events import Event
from echo2.core.records import Record, StepRecorded, VersionRecorded
from echo2.core.settings import CoordinatorSettings
from echo2.sim.books import Books, Track
from echo2.types import GroupId, LeaseId, Version


class Violation(AssertionError):  # noqa: N818  it is no error of the program that finds it
    """A promise was broken; the text says which, with values."""


def require(holds: bool, text: str | Callable[[], str]) -> None:
    if not holds:
        raise Violation(text if isinstance(text, str) else text())


DURABLE_MAX: Final = 64


@dataclass(slots=True)
class Moment:
    """`record` is the one that this event made durable; `durable` the newest steps and versions
    that are; `settled` the leases whose results
    were accepted; `owed` what a rewind must return now; `last`: the last batch was granted;
    `was_restarted`: the coordinator was, at some time."""

    settings: CoordinatorSettings
    books: Books
    event: Event | None = None
    record: Record | None = None
    pending: dict[int, Record] = field(default_factory=dict)
    durable: deque[StepRecorded | VersionRecorded] = field(
        default_factory=lambda: deque(maxlen=DURABLE_MAX)
    )
    durable_results: set[LeaseId] = field(default_factory=set)
    durable_incarnations: set[int] = field(default_factory=set)
    settled: set[LeaseId] = field(default_factory=set)
    final: set[Version] = field(default_factory=set)
    returned: set[GroupId] = field(default_factory=set)
    owed: dict[GroupId, str] = field(default_factory=dict)
    was_restarted: bool = False
    last: bool = False
    finished: bool = False


def check_window(moment: Moment, group: GroupId, track: Track, step: int) -> None:
    """Promise 1, for a group that is trained at `step`."""
    books, settings = moment.books, moment.settings
    low = max(0, step - settings.staleness_max)
    for version in track.versions:
        require(
            version in books.published and version.step <= step and books.is_alive(version),
            f"{group} is trained at {step} with tokens of {version}",
        )
        require(
            settings.late == "mask" or version.step >= low,
            f"{group} is trained at {step} with tokens of {version}: staleness "
            f"{step - version.step}, S is {settings.staleness_max}",
        )
    require(
        track.tokens_from(low) >= (settings.mask_min_tokens if settings.late == "mask" else 1),
        f"{group} is trained at {step} with no token of version {low} or later",
    )
    if settings.filter_zero_variance:
        require(
            len({t.reward for t in track.trajectories}) > 1,
            f"{group} has equal rewards and is trained",
        )
