"""Checks of evals: leased under the very version, each task scored once, n of N right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo2.core.events import Received
from echo2.messages import EvalResult, GroupAcknowledged, GroupResult, LeaseGranted
from echo2.sim.moment import Moment, require
from echo2.types import PeerId


class EvalChecks:
    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.books = moment.books
        self.sends: dict[type, Callable[[PeerId, Any], None]] = {EvalResult: self._result}

    def granted(self, peer: PeerId, granted: LeaseGranted) -> None:
        books = self.books
        eval_id, _, task = granted.group[1:].rpartition("-")
        found = books.evals.get(eval_id)
        require(
            found is not None and found.version == granted.version and not found.ended,
            f"eval lease {granted.lease} of {granted.version} for {eval_id}",
        )
        live = [place for place in books.eval_leases.values() if place == (eval_id, task)]
        require(not live, f"task {task} of {eval_id} is leased twice")
        books.begin_eval_lease(granted.lease, peer, eval_id, task)

    def acknowledged(self, told: GroupAcknowledged) -> None:
        books, event = self.books, self.moment.event
        eval_id, task = books.eval_leases[told.lease]
        books.end_lease(told.lease)
        if told.outcome != "accepted":
            return
        assert isinstance(event, Received)
        assert isinstance(event.message, GroupResult)
        found, trajectories = books.evals[eval_id], event.message.trajectories
        require(task not in found.tasks_done, f"task {task} of {eval_id} was scored twice")
        versions = {span.version for t in trajectories for span in t.spans}
        require(versions == {found.version}, f"{eval_id} scored tokens of {versions}")
        self.moment.settled.add(told.lease)
        found.tasks_done.add(task)
        found.rewards.append(sum(t.reward for t in trajectories) / len(trajectories))

    def _result(self, peer: PeerId, told: EvalResult) -> None:
        found = self.books.evals.get(told.eval_id)
        require(found is not None, f"{told.eval_id} ended, nobody asked for it")
        assert found is not None
        found.ended = True
        rewards = found.rewards
        require(
            (told.num_asked, told.num_done) == (found.num_asked, len(rewards)),
            f"{told.eval_id} reports {told.num_done} of {told.num_asked}, it is "
            f"{len(rewards)} of {found.num_asked}",
        )
        mean = sum(rewards) / len(rewards) if rewards else None
        same = mean == told.reward_mean or (
            mean is not None
            and told.reward_mean is not None
            and abs(mean - told.reward_mean) < 1e-9
        )
        require(same, f"{told.eval_id} reports a mean of {told.reward_mean}, it is {mean}")
