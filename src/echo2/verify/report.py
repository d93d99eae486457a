"""What a verification found: promises, each with what was checked and what broke it.

A promise holds when it has no violation. A promise about records that a run does not have
(no metrics.jsonl because the learner is somebody's own program) is skipped, with the reason;
`Report.ok` asks that none is broken and says nothing about the skipped ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

VIOLATIONS_PRINTED: Final = 5
"""Violations of one promise in the text; the JSON holds up to `VIOLATIONS_KEPT`."""
VIOLATIONS_KEPT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken promise: where (`file:line`, or a file), what, and the ids in it."""

    where: str
    text: str
    ids: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Promise:
    """One promise and how it fared. `checked` counts what was looked at, in `unit`s."""

    name: str
    text: str
    unit: str
    checked: int = 0
    num_violations: int = 0
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""

    @property
    def holds(self) -> bool:
        return self.num_violations == 0

    @property
    def verdict(self) -> str:
        if not self.holds:
            return "BROKEN"
        return "skipped" if self.skipped else "holds"


@dataclass(frozen=True, slots=True)
class Report:
    """All promises of one run folder, in the order in which they are printed."""

    run_dir: str
    promises: tuple[Promise, ...]
    summary: dict[str, Any]

    @property
    def ok(self) -> bool:
        return all(promise.holds for promise in self.promises)

    def __getitem__(self, name: str) -> Promise:
        return next(promise for promise in self.promises if promise.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain values only, ready for `json.dumps`."""
        return {
            "run_dir": self.run_dir,
            "ok": self.ok,
            "summary": self.summary,
            "promises": [
                {**dataclasses.asdict(promise), "holds": promise.holds} for promise in self.promises
            ],
        }

    def to_text(self) -> str:
        """A table of promises, then the violations and notes of each."""
        width = max(len(promise.name) for promise in self.promises)
        lines = [f"{self.run_dir}"]
        lines.extend(f"  {key.replace('_', ' ')}: {value}" for key, value in self.summary.items())
        lines.append("")
        for promise in self.promises:
            facts = ", ".join(f"{key} {_short(value)}" for key, value in promise.facts.items())
            checked = promise.skipped or f"{promise.checked} {promise.unit}"
            lines.append(
                f"  {promise.verdict:7}  {promise.name:{width}}  {checked}"
                + (f"; {facts}" if facts else "")
            )
        for promise in self.promises:
            if promise.holds and not promise.notes:
                continue
            lines.extend(("", f"{promise.name}: {promise.text}"))
            shown = promise.violations[:VIOLATIONS_PRINTED]
            lines.extend(f"  {violation.where}: {violation.text}" for violation in shown)
            if promise.num_violations > len(shown):
                lines.append(f"  and {promise.num_violations - len(shown)} more")
            lines.extend(f"  note: {note}" for note in promise.notes)
        broken = sum(not promise.holds for promise in self.promises)
        skipped = sum(bool(promise.skipped) for promise in self.promises if promise.holds)
        held = len(self.promises) - broken - skipped
        lines.extend(
            (
                "",
                f"{held} promises hold, {broken} broken"
                + (f", {skipped} skipped" if skipped else ""),
            )
        )
        return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
