"""The engine "null" on a virtual clock: groups take the time of their tokens, installs pause them.

As `echo2_workers.engines.null`: a group, which is one slot, produces `tokens_per_s`, divided evenly
over its trajectories; its length follows from the seed of its lease. At an update running groups
go on with the new version ("continue"), end first ("finish") or begin again ("abort"), and what
comes meanwhile waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from echo2.group_lengths import group_tokens, trajectory_tokens
from echo2.messages import GroupResult, LeaseGranted
from echo2.sim.timeline import Timeline
from echo2.sim.virtual.unframed import unframed
from echo2.types import LeaseId, Span, TrajectoryHeader, Version

PROMPT_TOKENS = 8
Mode = Literal["continue", "finish", "abort"]


@dataclass(slots=True, eq=False)
class _Group:
    """`length` of its longest trajectory; `produced` of it until `since`, then `rate` a second.
    `marks`: (version, position up to which it sampled)."""

    granted: LeaseGranted
    tokens: int
    length: int
    rate: float
    began: float
    since: float
    produced: float = 0.0
    marks: list[tuple[Version, int]] = field(default_factory=list)
    turn: int = 0
    """Counts pauses: an end that was planned before one does not come."""

    def position(self, now: float) -> float:
        return min(float(self.length), self.produced + (now - self.since) * self.rate)


class VirtualEngine:
    """`on_done(result)` when a group is sampled; `on_installed(version, install_s, pause_s)`."""

    def __init__(
        self,
        timeline: Timeline,
        rng: Random,
        *,
        tokens_per_s: float,
        tokens_mean: float,
        tokens_cv: float,
        install_s: float,
        mode: Mode,
        on_done: Callable[[GroupResult], None],
        on_installed: Callable[[Version, float, float], None],
    ) -> None:
        self._timeline = timeline
        self._rng = rng
        self._tokens_per_s = tokens_per_s
        self._tokens_mean = tokens_mean
        self._tokens_cv = tokens_cv
        self._install_s = install_s
        self._mode = mode
        self._on_done = on_done
        self._on_installed = on_installed
        self._version: Version | None = None
        self._frozen = True
        self._stopped = False
        self._waiting: list[LeaseGranted] = []
        self._groups: dict[LeaseId, _Group] = {}
        self._installing: tuple[Version, float] | None = None

    def stop(self) -> None:
        """The machine is gone."""
        self._stopped = True
        self._groups.clear()
        self._waiting.clear()

    # ----------------------------------------------------------------------- groups

    def start(self, granted: LeaseGranted) -> None:
        if self._frozen or self._installing is not None:
            self._waiting.append(granted)
            return
        now = self._timeline.now
        tokens = group_tokens(granted.seed, mean=self._tokens_mean, cv=self._tokens_cv)
        size, longest = granted.group_size, granted.sampling.max_tokens
        length = min(longest, trajectory_tokens(tokens, index=0, group_size=size))
        rate = self._tokens_per_s / size
        group = _Group(granted, tokens, length, rate, now, now)
        self._groups[granted.lease] = group
        self._plan_end(group)

    def abort(self, lease: LeaseId) -> None:
        if self._groups.pop(lease, None) is None:
            self._waiting = [granted for granted in self._waiting if granted.lease != lease]
        self._freeze_if_drained()

    def lease_tokens(self) -> dict[LeaseId, int]:
        """Sampled so far, by lease."""
        now = self._timeline.now
        found = {
            lease: int((g.produced if self._frozen else g.position(now)) * g.granted.group_size)
            for lease, g in self._groups.items()
        }
        return found | {granted.lease: 0 for granted in self._waiting}

    @property
    def tokens_per_s(self) -> float:
        return 0.0 if self._frozen else self._tokens_per_s * len(self._groups)

    def _plan_end(self, group: _Group) -> None:
        left_s = (group.length - group.produced) / group.rate
        self._timeline.after(left_s, self._ended, group, group.turn)

    def _ended(self, group: _Group, turn: int) -> None:
        if self._stopped or group.turn != turn or self._frozen:
            return
        if self._groups.pop(group.granted.lease, None) is None:
            return
        assert self._version is not None
        self._mark(group, group.length)
        self._on_done(self._result(group))
        self._freeze_if_drained()

    def _mark(self, group: _Group, position: int) -> None:
        assert self._version is not None
        if position > (group.marks[-1][1] if group.marks else 0):
            group.marks.append((self._version, position))

    def _result(self, group: _Group) -> GroupResult:
        granted = group.granted
        size, longest = granted.group_size, granted.sampling.max_tokens
        headers: dict[tuple[int, bool], TrajectoryHeader] = {}
        trajectories = []
        for index in range(size):
            full = trajectory_tokens(group.tokens, index=index, group_size=size)
            key = full, self._rng.random() < 0.5
            if key not in headers:
                headers[key] = _header(min(full, longest), key[1], group.marks, cut=full > longest)
            trajectories.append(headers[key])
        return unframed(
            GroupResult,
            lease=granted.lease,
            group=granted.group,
            attempt=granted.attempt,
            trajectories=tuple(trajectories),
            generate_s=self._timeline.now - group.began,
            environment_s=0.0,
            token_ids=b"",
            logprobs=b"",
            loss_mask=b"",
        )

    # --------------------------------------------------------------------- installs

    def install(self, version: Version) -> None:
        """Pause, load, resume."""
        self._installing = version, self._timeline.now
        if self._mode != "finish" or self._frozen or not self._groups:
            self._freeze()

    def _freeze_if_drained(self) -> None:
        if self._installing is not None and not self._frozen and not self._groups:
            self._freeze()

    def _freeze(self) -> None:
        now = self._timeline.now
        if not self._frozen:
            for group in self._groups.values():
                group.turn += 1
                if self._mode == "abort":
                    group.produced, group.marks = 0.0, []
                else:
                    group.produced = group.position(now)
                    self._mark(group, int(group.produced))
        self._frozen = True
        self._timeline.after(self._install_s, self._loaded, now)

    def _loaded(self, paused_at: float) -> None:
        if self._stopped:
            return
        assert self._installing is not None
        version, began = self._installing
        now = self._timeline.now
        self._version, self._installing, self._frozen = version, None, False
        for group in self._groups.values():
            group.since = now
            self._plan_end(group)
        waiting, self._waiting = self._waiting, []
        for granted in waiting:
            self.start(granted)
        self._on_installed(version, now - began, now - paused_at)


def _header(
    sampled: int, solved: bool, marks: list[tuple[Version, int]], *, cut: bool
) -> TrajectoryHeader:
    spans, start = [], 0
    for version, position in marks:
        end = min(position, sampled)
        if end > start:
            spans.append(Span(version, PROMPT_TOKENS + start, PROMPT_TOKENS + end))
            start = end
    return TrajectoryHeader(
        length=PROMPT_TOKENS + sampled,
        prompt_length=PROMPT_TOKENS,
        num_sampled=sampled,
        reward=float(solved),
        finish="length" if cut else "stop",
        num_turns=1,
        spans=tuple(spans),
    )
