"""Promise 3, whole groups exactly once, and promise 2, none thrown away that was waited for."""

from __future__ import annotations

from typing import Any, Final

from echo2.verify.check import Check
from echo2.verify.records import Line

ENDS: Final = frozenset({"trained", "expired", "failed", "filtered", "cancelled"})


class OneEnd(Check):
    NAME = "one_end"
    TEXT = "of each group exactly one end stands: a second comes only after a return"
    UNIT = "ends"

    def read(self, line: Line) -> None:
        if line["event"] == "group_ended":
            self.promise.checked += 1
            self._ended(line)
        elif line["event"] == "group_returned":
            self._returned(line)

    def _ended(self, line: Line) -> None:
        group, end = line["group_id"], line["end"]
        if end not in ENDS:
            self.violate(
                line.where,
                f"group {group} ended {end!r}; an end is one of {', '.join(sorted(ENDS))}",
                group_id=group,
            )
        before = self.history.standing.get(group)
        if before is not None:
            self.violate(
                line.where,
                f"group {group} ended {end}, but its end {before.end} ({before.where}) stands; "
                "only a group_returned between them would allow it",
                group_id=group,
            )

    def _returned(self, line: Line) -> None:
        group = line["group_id"]
        if group not in self.history.standing:
            self.violate(
                line.where,
                f"group {group} was returned, but no end of it stands",
                group_id=group,
            )

    def conclude(self) -> None:
        counts: dict[str, int] = {}
        for end in self.history.standing.values():
            counts[end.end] = counts.get(end.end, 0) + 1
        self.promise.facts.update(sorted(counts.items()))


class AllEnded(Check):
    NAME = "all_ended"
    TEXT = "at the end of a finished run every group has ended"
    UNIT = "groups"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: dict[str, str] = {}
        self._num_seen = 0

    def read(self, line: Line) -> None:
        match line["event"]:
            case "group_ended":
                if self._open.pop(line["group_id"], None) is None:
                    self._num_seen += 1
            case "lease_granted" | "lease_revoked" | "lease_failed" | "group_returned":
                group = line["group_id"]
                ended = line["event"] != "group_returned" and group in self.history.standing
                if not ended:
                    self._num_seen += group not in self._open
                    self._open[group] = line.where

    def conclude(self) -> None:
        self.promise.checked = self._num_seen
        if not self._open:
            return
        if not self.history.finished:
            self.promise.notes.append(
                f"{len(self._open)} groups were still under way when the run was interrupted "
                f"({self.history.end_reason or 'it has no run_finished'})"
            )
            return
        for group, where in self._open.items():
            self.violate(
                where,
                f"group {group} was under way and never ended, though the run finished",
                group_id=group,
            )


class Reasons(Check):
    NAME = "reasons"
    TEXT = "every end other than trained has a reason"
    UNIT = "ends"

    def read(self, line: Line) -> None:
        if line["event"] != "group_ended" or line["end"] == "trained":
            return
        self.promise.checked += 1
        if not line["reason"].strip():
            self.violate(
                line.where,
                f"group {line['group_id']} ended {line['end']} without a reason",
                group_id=line["group_id"],
            )


class OnlyActiveWork(Check):
    NAME = "activation"
    TEXT = "no worker that stands by gets a lease"
    UNIT = "leases"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._standby: dict[str, str] = {}

    def read(self, line: Line) -> None:
        match line["event"]:
            case "worker_released":
                self._standby[line["worker"]] = line.where
            case "worker_activated" | "worker_gone":
                self._standby.pop(line["worker"], None)
            case "run_started":
                self._standby.clear()
            case "lease_granted":
                self.promise.checked += 1
                since = self._standby.get(line["worker"])
                if since is not None:
                    self.violate(
                        line.where,
                        f"lease {line['lease']} was granted to {line['worker']}, which stands by "
                        f"since {since}",
                        worker=line["worker"],
                    )


class NoExpiryWhenWaiting(Check):
    NAME = "no_expiry_when_waiting"
    TEXT = 'with staleness.late = "wait" no group expires'
    UNIT = "ends"

    def read(self, line: Line) -> None:
        if line["event"] != "group_ended":
            return
        self.promise.checked += 1
        if line["end"] != "expired":
            return
        self.promise.facts["expired"] = self.promise.facts.get("expired", 0) + 1
        if self.settings.late == "wait":
            self.violate(
                line.where,
                f"group {line['group_id']} expired ({line['reason']}), though late groups are "
                "waited for",
                group_id=line["group_id"],
            )

    def conclude(self) -> None:
        if self.settings.late != "wait":
            self.promise.skipped = f"staleness.late is {self.settings.late!r}"


class Attempts(Check):
    """A resume may queue a group again that had lost nothing, so each one allows a lease more."""

    NAME = "attempts"
    TEXT = "no group uses more leases than dispatch.attempts_max (and one for each resume)"
    UNIT = "groups"

    def read(self, line: Line) -> None:
        if line["event"] != "group_ended":
            return
        self.promise.checked += 1
        attempts = line["attempts"]
        allowed = self.settings.attempts_max + max(0, len(self.history.resume_steps) - 1)
        self.promise.facts["most"] = max(self.promise.facts.get("most", 0), attempts)
        if attempts > allowed:
            self.violate(
                line.where,
                f"group {line['group_id']} used {attempts} leases; at most {allowed} are allowed",
                group_id=line["group_id"],
                attempts=attempts,
            )


def group_checks() -> tuple[type[Check], ...]:
    return (OneEnd, AllEnded, Reasons, OnlyActiveWork, NoExpiryWhenWaiting, Attempts)
