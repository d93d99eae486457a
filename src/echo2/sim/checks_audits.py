"""Checks of audits: what is chosen is audited, verdicts are true, offenders are kept out.

Which groups must be audited is computed here once more, from the documents; whether a verdict is
right is read from the tokens of the simulated groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from echo2.core.records import GroupStored
from echo2.core.settings import CoordinatorSettings
from echo2.sim.books import WITH_RESULT, Place, Track
from echo2.sim.moment import Moment, require
from echo2.types import GroupId, PeerId


def must_be_audited(group: GroupId, settings: CoordinatorSettings) -> bool:
    """The first eight bytes of the keyed BLAKE2b of "RUN:GROUP", as a fraction, below the share."""
    text = f"{settings.run_id}:{group}".encode()
    digest = hashlib.blake2b(text, key=settings.audit.key, digest_size=8).hexdigest()
    return int(digest, 16) / 16**16 < settings.audit.share


class AuditChecks:
    """`liars` may be quarantined; nobody else."""

    def __init__(self, moment: Moment, liars: frozenset[PeerId]) -> None:
        self.moment = moment
        self.books = moment.books
        self.settings = moment.settings
        self.liars = liars
        self.emits: dict[str, Callable[[dict[str, Any]], None]] = {
            "audit_opened": self._opened,
            "group_audited": self._audited,
            "group_withdrawn": self._withdrawn,
            "worker_quarantined": self._quarantined,
            "worker_pardoned": self._pardoned,
        }

    def check_trained(self, group: GroupId, track: Track) -> None:
        """A group that the learner gets, or had got."""
        books = self.books
        if must_be_audited(group, self.settings):
            verdict = books.verdicts.get((group, track.lease))
            require(
                verdict in ("confirmed", "unaudited"),
                f"{group} is trained, it had to be audited, and its verdict is {verdict}",
            )
        worker = track.worker
        had = books.quarantined.get(worker) if worker is not None else None
        require(
            had is None or group in had,
            f"{group} of {worker}, which is quarantined, is trained",
        )

    def _opened(self, fields: dict[str, Any]) -> None:
        """Its acknowledgement went before, or was lost when the coordinator was killed between."""
        group, record = fields["group_id"], self.moment.record
        track = self.books.track(group)
        is_durable = isinstance(record, GroupStored) and record.group == group
        require(
            track.place is Place.BUFFERED or (track.place is Place.STORING and is_durable),
            f"{group} is audited while it is {track.place.value}",
        )
        require(track.lease == fields["lease"], f"{group} is audited under {fields['lease']}")
        require(must_be_audited(group, self.settings), f"{group} is audited, and was not chosen")
        self.books.move(track, Place.AUDITING)

    def _audited(self, fields: dict[str, Any]) -> None:
        group, verdict = fields["group_id"], fields["verdict"]
        track = self.books.track(group)
        require(
            track.place is Place.AUDITING and track.lease == fields["lease"],
            f"{group} has a verdict while it is {track.place.value}",
        )
        self.books.verdicts[group, track.lease] = verdict
        claimed = tuple(header.reward for header in track.trajectories)
        if verdict == "unaudited":
            require(bool(fields["reason"]), f"{group} is unaudited without a reason")
        else:
            require(
                (verdict == "confirmed") == (claimed == track.truth),
                f"{group} claims {claimed}, it is worth {track.truth}, and is {verdict}",
            )
            auditor = fields["auditor"]
            require(
                auditor in self.settings.audit.workers and auditor != track.worker,
                f"{group} of {track.worker} was audited by {auditor}",
            )
        if verdict != "refuted":
            self.books.move(track, Place.BUFFERED)

    def _withdrawn(self, fields: dict[str, Any]) -> None:
        group = fields["group_id"]
        track = self.books.track(group)
        require(
            track.place in WITH_RESULT and track.lease == fields["lease"],
            f"{group} is withdrawn while it is {track.place.value}",
        )
        refuted = self.books.verdicts.get((group, track.lease)) == "refuted"
        require(
            refuted or track.worker in self.books.quarantined,
            f"{group} of {track.worker} is withdrawn, and nothing speaks against it",
        )
        self.books.withdrawn.add(fields["lease"])
        self.books.requeue(track)

    def _quarantined(self, fields: dict[str, Any]) -> None:
        worker = fields["worker"]
        require(worker in self.liars, f"{worker} is honest and was quarantined: {fields['reason']}")
        self.books.quarantined[worker] = frozenset(fields["in_training"])

    def _pardoned(self, fields: dict[str, Any]) -> None:
        require(
            self.books.quarantined.pop(fields["worker"], None) is not None,
            f"{fields['worker']} is pardoned, and was not quarantined",
        )

    def after(self) -> None:
        """Nothing is left of a quarantined worker but what the learner has."""
        for worker, had in self.books.quarantined.items():
            book = self.books.workers.get(worker)
            require(book is None, f"{worker} is quarantined, and is here")
            for group, track in self.books.tracks.items():
                held = track.place is Place.BUFFERED or track.place is Place.AUDITING
                require(
                    not held or track.worker != worker or group in had or self.moment.was_restarted,
                    f"{group} of {worker}, which is quarantined, is {track.place.value}",
                )
