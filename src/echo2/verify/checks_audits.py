"""Promise 6, workers are not trusted: what is chosen is audited, and offenders are kept out.

Which groups must have a verdict is computed here from RUN/audit.key, the run's id and audit.share,
without the code that chose them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from echo2.verify.check import Check
from echo2.verify.records import Line

KEY_FILE: Final = "audit.key"
VERDICTS: Final = frozenset({"confirmed", "refuted", "unaudited"})


class Audited(Check):
    NAME = "audited"
    TEXT = "every group that is chosen has its verdict before it is trained, and none is refuted"
    UNIT = "chosen groups"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._verdicts: dict[str, str] = {}
        self._key = _read_key(self.run_dir / KEY_FILE)

    def read(self, line: Line) -> None:
        match line["event"]:
            case "lease_granted":
                self._verdicts.pop(line["group_id"], None)  # another result will come
            case "group_audited":
                self._verdicts[line["group_id"]] = line["verdict"]
            case "group_ended" if line["end"] in ("trained", "filtered"):
                self._used(line)

    def _used(self, line: Line) -> None:
        group = line["group_id"]
        if self._key is None or not self.history.run_id:
            return  # which were chosen is not known
        if not self._is_chosen(self._key, group):
            return
        self.promise.checked += 1
        verdict = self._verdicts.get(group)
        self.promise.facts[verdict or "none"] = self.promise.facts.get(verdict or "none", 0) + 1
        if verdict not in ("confirmed", "unaudited"):
            self.violate(
                line.where,
                f"group {group} ended {line['end']}; it is one of those that are audited, and its "
                f"verdict is {verdict or 'missing'}",
                group_id=group,
            )

    def _is_chosen(self, key: bytes, group: str) -> bool:
        """The first eight bytes of the keyed BLAKE2b of "RUN:GROUP", as a fraction, below the
        share."""
        text = f"{self.history.run_id}:{group}".encode()
        digest = hashlib.blake2b(text, key=key, digest_size=8).hexdigest()
        return int(digest, 16) / 16**16 < self.settings.audit_share

    def conclude(self) -> None:
        if self.settings.audit_share <= 0:
            self.promise.skipped = "audit.share is 0"
        elif self._key is None:
            self.promise.skipped = f"there is no {KEY_FILE} that says which groups were chosen"


class TrueVerdicts(Check):
    NAME = "true_verdicts"
    TEXT = "a verdict is what its rewards say, given by an auditor that did not sample the group"
    UNIT = "verdicts"

    def read(self, line: Line) -> None:
        if line["event"] != "group_audited":
            return
        self.promise.checked += 1
        problem = self._problem(line)
        if problem:
            self.violate(
                line.where, f"group {line['group_id']} {problem}", group_id=line["group_id"]
            )

    def _problem(self, line: Line) -> str:
        verdict, auditor = line["verdict"], line["auditor"]
        if verdict not in VERDICTS:
            return f"has the verdict {verdict!r}; it is one of {', '.join(sorted(VERDICTS))}"
        if verdict == "unaudited":
            return "" if line["reason"].strip() else "is unaudited without a reason"
        if auditor not in self.settings.audit_workers:
            return f"was audited by {auditor}, which audit.workers does not name"
        if auditor == line["worker"]:
            return f"was audited by {auditor}, which sampled it"
        diff, tolerance = line["reward_diff_max"], self.settings.reward_tolerance
        if verdict == "confirmed":
            agrees = diff is not None and diff <= tolerance
            return "" if agrees else f"is confirmed with rewards that differ by {diff}"
        pairs = list(zip(line["claimed"], line["recomputed"], strict=False))
        if line["recomputed"] and all(abs(a - b) <= tolerance for a, b in pairs):
            return "is refuted, and all its rewards agree"
        return "" if line["reason"].strip() else "is refuted without a reason"


class KeptOut(Check):
    NAME = "kept_out"
    TEXT = (
        "after its quarantine nothing of a worker is trained but what the learner had, and it gets "
        "no lease, until it is pardoned"
    )
    UNIT = "quarantines"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._had: dict[str, set[str]] = {}

    def read(self, line: Line) -> None:
        match line["event"]:
            case "worker_quarantined":
                self.promise.checked += 1
                self._had[line["worker"]] = set(line["in_training"])
                if not line["evidence"]:
                    text = f"{line['worker']} is quarantined without evidence"
                    self.violate(line.where, text, worker=line["worker"])
            case "worker_pardoned":
                self._had.pop(line["worker"], None)
            case "group_ended" if line["end"] == "trained":
                self._trained(line)
            case "lease_granted" if line["worker"] in self._had:
                self.violate(
                    line.where,
                    f"{line['worker']} is quarantined and got the lease {line['lease']}",
                    worker=line["worker"],
                )

    def _trained(self, line: Line) -> None:
        had = self._had.get(line["worker"] or "")
        if had is None:
            return
        if line["group_id"] not in had:
            self.violate(
                line.where,
                f"group {line['group_id']} of {line['worker']}, which is quarantined, was trained",
                group_id=line["group_id"],
            )
        had.discard(line["group_id"])

    def conclude(self) -> None:
        self.promise.facts.update({"in_quarantine": len(self._had)} if self._had else {})


def audit_checks() -> tuple[type[Check], ...]:
    return (Audited, TrueVerdicts, KeptOut)


def _read_key(path: Path) -> bytes | None:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return None
