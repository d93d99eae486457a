"""Promises 3 and 7 on the disk: what a coordinator that is started now would go on with.

`ledger.sqlite` and the segments in `ledger/` are read as they lie there, without the code that
wrote them. After a kill events.jsonl may be ahead of the ledger, which takes it in at the next
start; after a power cut under an earlier release the ledger may be ahead of the file. Only of a run
that came to its end must both say the same.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from echo2.verify.check import Check

LEDGER_FILE: Final = "ledger.sqlite"
SEGMENTS: Final = "ledger"
_GROUPS: Final = "SELECT idx, ended, segment, offset, num_bytes, digest FROM groups ORDER BY idx"


class LedgerWhole(Check):
    NAME = "ledger"
    TEXT = "the ledger is whole, agrees with the events, and holds every group it answers for"
    UNIT = "groups"

    def conclude(self) -> None:
        path = self.run_dir / LEDGER_FILE
        if not path.is_file():
            self.promise.skipped = f"there is no {LEDGER_FILE}"
            return
        try:
            # To read a log that its writer left behind, SQLite may have to write beside it.
            database = sqlite3.connect(f"file:{path}?mode=rw", uri=True)
            try:
                self._read(database)
            finally:
                database.close()
        except sqlite3.DatabaseError as error:
            self.violate(LEDGER_FILE, f"it cannot be read: {error}")

    def _read(self, database: sqlite3.Connection) -> None:
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            self.violate(LEDGER_FILE, f"SQLite finds it damaged: {verdict}")
            return
        for index, ended, segment, *place in database.execute(_GROUPS):
            self.promise.checked += 1
            group = f"g{index}"
            if segment is not None and (problem := self._payload_problem(segment, *place)):
                self.violate(LEDGER_FILE, f"the payload of {group} {problem}", group_id=group)
            if ended != "earlier":  # under a release without a ledger
                self._compare(group, ended, acknowledged=segment is not None)
        if self.history.finished:
            self._compare_quarantined(database)
            self._compare_counts(dict(database.execute("SELECT ended, number FROM ends")))

    def _payload_problem(self, segment: int, offset: int, num_bytes: int, digest: bytes) -> str:
        path = Path(SEGMENTS) / f"{segment:08}.seg"
        try:
            with (self.run_dir / path).open("rb") as file:
                file.seek(offset)
                content = file.read(num_bytes)
        except OSError as error:
            return f"cannot be read from {path}: {error.strerror}"
        if blake3(content).digest() != digest:
            return f"is not in {path} as it was delivered"
        return ""

    def _compare(self, group: str, ended: str | None, *, acknowledged: bool) -> None:
        standing = self.history.standing.get(group)
        told = standing.end if standing is not None else None
        if ended is not None and told is not None and ended != told:
            text = f"the ledger says that {group} ended {ended}, the events say {told}"
            self.violate(LEDGER_FILE, text, group_id=group)
        elif self.history.finished and (ended != told or (acknowledged and not ended)):
            text = f"the run is over; the ledger says {ended or 'open'} of {group}, the events say "
            self.violate(LEDGER_FILE, text + (told or "open"), group_id=group)

    def _compare_quarantined(self, database: sqlite3.Connection) -> None:
        row = database.execute("SELECT value FROM facts WHERE name = 'quarantined'").fetchone()
        kept = set() if row is None else set(json.loads(row[0]))
        if kept != self.history.quarantined:
            self.violate(
                LEDGER_FILE,
                f"the ledger has {sorted(kept)} in quarantine, the events say "
                f"{sorted(self.history.quarantined)}",
            )

    def _compare_counts(self, counted: dict[str, int]) -> None:
        told = Counter(end.end for end in self.history.standing.values())
        found: Any = Counter({end: number for end, number in counted.items() if number})
        if found != told:
            self.violate(
                LEDGER_FILE,
                f"the ledger counts {dict(sorted(found.items()))} ends, the events "
                f"{dict(sorted(told.items()))}",
            )


def ledger_checks() -> tuple[type[Check], ...]:
    return (LedgerWhole,)
