"""Promise 1, staleness, and the lineage behind it: what was trained, by which versions."""

from __future__ import annotations

from typing import Any, Final

from echo2.verify.check import Check
from echo2.verify.records import Line

_VERSION_FIELDS: Final = (
    "trained_at",
    "min_version",
    "max_version",
    "min_incarnation",
    "max_incarnation",
)


def _is_trained(line: Line) -> bool:
    return bool(line["event"] == "group_ended" and line["end"] == "trained")


def _has_versions(line: Line) -> bool:
    return all(line[name] is not None for name in _VERSION_FIELDS)


class Staleness(Check):
    NAME = "staleness"
    TEXT = "no token in the loss is older than S steps or younger than its batch"
    UNIT = "trained groups"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._histogram: dict[int, int] = {}

    def read(self, line: Line) -> None:
        if not _is_trained(line):
            return
        self.promise.checked += 1
        group = line["group_id"]
        if not _has_versions(line):
            self.violate(
                line.where,
                f"group {group} was trained, but the versions that sampled it or the step are "
                "not recorded",
                group_id=group,
            )
            return
        trained_at, low, high = line["trained_at"], line["min_version"], line["max_version"]
        staleness = trained_at - low
        self._histogram[staleness] = self._histogram.get(staleness, 0) + 1
        if not 0 <= staleness <= self.settings.staleness_max:
            self.violate(
                line.where,
                f"group {group} sampled by version {low} was trained at {trained_at}: staleness "
                f"{staleness}, allowed are 0 to {self.settings.staleness_max}",
                group_id=group,
                staleness=staleness,
                trained_at=trained_at,
            )
        if not low <= high <= trained_at:
            self.violate(
                line.where,
                f"group {group} names versions {low} to {high} for step {trained_at}; they must "
                "be in order and none above the step",
                group_id=group,
                max_version=high,
                trained_at=trained_at,
            )

    def conclude(self) -> None:
        total = sum(self._histogram.values())
        self.promise.facts["allowed"] = self.settings.staleness_max
        if total:
            self.promise.facts["max"] = max(self._histogram)
            weighted = sum(value * count for value, count in self._histogram.items())
            self.promise.facts["mean"] = weighted / total


class VersionsKnown(Check):
    NAME = "versions_known"
    TEXT = "what was trained was sampled by published versions that its worker had installed"
    UNIT = "trained groups"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._used: dict[tuple[str, int, int], str] = {}

    def read(self, line: Line) -> None:
        if not _is_trained(line) or not _has_versions(line):
            return
        self.promise.checked += 1
        group, worker = line["group_id"], line["worker"]
        if worker is None:
            self.violate(line.where, f"group {group} was trained without a worker", group_id=group)
            return
        for which in ("min", "max"):
            version = (line[f"{which}_incarnation"], line[f"{which}_version"])
            if version not in self.history.published:
                self.violate(
                    line.where,
                    f"group {group} was sampled by {_name(version)}, which was not published "
                    "before it was trained",
                    group_id=group,
                    version=_name(version),
                )
            self._used.setdefault((worker, *version), line.where)

    def conclude(self) -> None:
        for (worker, *version), where in self._used.items():
            if (version[0], version[1]) not in self.history.installed.get(worker, ()):
                self.violate(
                    where,
                    f"worker {worker} delivered tokens of {_name((version[0], version[1]))}, "
                    "but it never installed that version",
                    worker=worker,
                    version=_name((version[0], version[1])),
                )


class Lineage(Check):
    NAME = "lineage"
    TEXT = "nothing is trained that a version after the resumed checkpoint had sampled"
    UNIT = "trained groups"

    def read(self, line: Line) -> None:
        if not _is_trained(line) or not _has_versions(line):
            return
        self.promise.checked += 1
        group, newest = line["group_id"], line["incarnation"]
        older = False
        for which in ("min", "max"):
            incarnation, step = line[f"{which}_incarnation"], line[f"{which}_version"]
            older |= incarnation < newest
            limit = self.history.resume_limit(incarnation, newest)
            if incarnation > newest or (limit is not None and step > limit):
                self.violate(
                    line.where,
                    f"group {group} was sampled by {_name((incarnation, step))} and trained by "
                    f"incarnation {newest}; "
                    + (
                        f"of incarnation {incarnation} only versions up to {limit} survive there"
                        if incarnation < newest
                        else "that version comes after it"
                    ),
                    group_id=group,
                    version=_name((incarnation, step)),
                )
        if older:
            key = "across_incarnations"
            self.promise.facts[key] = self.promise.facts.get(key, 0) + 1


class Rewinds(Check):
    NAME = "rewinds"
    TEXT = "a resume at step t returns every group that was trained at t or later, and no other"
    UNIT = "resumes"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._owed: dict[str, str] = {}

    def read(self, line: Line) -> None:
        match line["event"]:
            case "learner_joined":
                self._joined(line)
            case "group_returned":
                self._returned(line)
            case "step_completed" | "run_finished":
                self._settle()

    def _joined(self, line: Line) -> None:
        incarnation, step = line["incarnation"], line["resume_step"]
        if incarnation in self.history.resume_steps:
            return
        self._settle()
        self.promise.checked += 1
        self._owed = {
            group: f"trained at {end.trained_at} ({end.where}) before incarnation {incarnation} "
            f"resumed at {step}"
            for group, end in self.history.standing.items()
            if end.trained_at is not None and end.trained_at >= step
        }
        if step > self.history.v and self.history.incarnation > 0:
            self.violate(
                line.where,
                f"incarnation {incarnation} resumed at {step}, but only {self.history.v} steps "
                "were completed",
                incarnation=incarnation,
                resume_step=step,
            )

    def _returned(self, line: Line) -> None:
        group = line["group_id"]
        key = "returned"
        self.promise.facts[key] = self.promise.facts.get(key, 0) + 1
        self._owed.pop(group, None)
        end = self.history.standing.get(group)
        if line["incarnation"] != self.history.incarnation:
            self.violate(
                line.where,
                f"group {group} was returned to incarnation {line['incarnation']}; the learner "
                f"is incarnation {self.history.incarnation}",
                group_id=group,
            )
        if end is None or end.trained_at is None:
            return
        if self.history.survives(end.incarnation, end.trained_at):
            self.violate(
                line.where,
                f"group {group} was returned, though the step {end.trained_at} that trained it "
                f"({end.where}) survives",
                group_id=group,
            )

    def _settle(self) -> None:
        for group, text in self._owed.items():
            self.violate(
                text.partition("(")[2].partition(")")[0],
                f"group {group} was {text}, and was never returned",
                group_id=group,
            )
        self._owed = {}


class TrainedOnce(Check):
    NAME = "trained_once"
    TEXT = "no group is trained twice in the surviving line of steps"
    UNIT = "trained groups"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._trained: dict[str, tuple[tuple[int, int], ...]] = {}

    def read(self, line: Line) -> None:
        if _is_trained(line) and line["trained_at"] is not None:
            group = line["group_id"]
            batch = (line["incarnation"], line["trained_at"])
            self._trained[group] = (*self._trained.get(group, ()), batch)

    def conclude(self) -> None:
        self.promise.checked = len(self._trained)
        for group, batches in self._trained.items():
            if len(batches) < 2:
                continue
            alive = [
                step for incarnation, step in batches if self.history.survives(incarnation, step)
            ]
            if len(alive) > 1:
                self.violate(
                    "events.jsonl",
                    f"group {group} was trained at steps {', '.join(map(str, alive))}, and all "
                    "of them survive",
                    group_id=group,
                    steps=alive,
                )


class Fencing(Check):
    NAME = "fencing"
    TEXT = "only the newest incarnation completes steps and publishes"
    UNIT = "events of learners"

    def read(self, line: Line) -> None:
        match line["event"]:
            case "step_completed" | "version_published":
                acting = True
            case "group_ended":
                acting = line["end"] == "trained"
            case "learner_joined":
                acting = False
                self._joined(line)
            case _:
                return
        if not acting:
            return
        self.promise.checked += 1
        if line["incarnation"] != self.history.incarnation:
            self.violate(
                line.where,
                f"{line['event']} of incarnation {line['incarnation']}, while the newest is "
                f"{self.history.incarnation}",
                incarnation=line["incarnation"],
            )

    def _joined(self, line: Line) -> None:
        incarnation = line["incarnation"]
        if incarnation not in self.history.resume_steps and incarnation <= self.history.incarnation:
            self.violate(
                line.where,
                f"a learner joined as incarnation {incarnation}, which is not above "
                f"{self.history.incarnation}",
                incarnation=incarnation,
            )

    def conclude(self) -> None:
        self.promise.facts["incarnations"] = len(self.history.resume_steps)


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def staleness_checks() -> tuple[type[Check], ...]:
    return (Staleness, VersionsKnown, Lineage, Rewinds, TrainedOnce, Fencing)
