"""Machines that were started for this run, and what activation knows besides its workers.

    StartMachine --> starting --> running --release, its leases end--> stopping --> gone
                        |            '--its worker is away for ready_timeout_s--^
                        '--the start failed, or no worker was ready in time-----^

A machine is named after the worker that it runs. It counts, and is paid, from the order to start it
until it is gone. An offer whose machine failed rests, twice as long after each failure in a row.
`ActivationDesk` decides; the shell carries out and writes down.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from echo2.core.estimates import Estimate
from echo2.core.settings import ActivationTerms
from echo2.types import PeerId

REST_S: Final = 5.0
REST_MAX_S: Final = 600.0
"""An offer whose machine failed rests from the one to the other."""


@dataclass(slots=True)
class Machine:
    """`since`: it was ordered, or found after a restart. `away_since`: its worker was not ready
    from then on; None while it is. `released_at`: it stops when its worker has no lease left.
    `is_stopping`: the order to stop it is out."""

    worker: PeerId
    offer: str
    since: float
    away_since: float | None
    is_running: bool = False
    is_adopted: bool = False
    is_stopping: bool = False
    released_at: float | None = None
    text: str = ""

    @property
    def state_name(self) -> str:
        if self.is_stopping:
            return "stopping"
        return "running" if self.is_running else "starting"


@dataclass(slots=True)
class OfferRecord:
    """`lead_s`: from the order until the worker is ready."""

    lead_s: Estimate = field(default_factory=Estimate)
    num_failures: int = 0
    rests_until: float = 0.0

    def failed(self, now: float) -> None:
        self.rests_until = now + min(REST_MAX_S, REST_S * 2 ** min(self.num_failures, 10))
        self.num_failures += 1


class Activation:
    """`machines` is None until the shell told of those that are written down. `is_settled`: rates
    and T_train are known, and the policy decides; before, whoever comes is active."""

    def __init__(self, terms: ActivationTerms, *, auditors: Collection[PeerId] = ()) -> None:
        self.terms = terms
        self.auditors = frozenset(auditors)
        self.machines: dict[PeerId, Machine] | None = None
        self.records = {offer.name: OfferRecord() for offer in terms.offers}
        self.next_number = 1
        self.is_settled = False
        self.boost = 1.0
        self.wanted_rate: float | None = None
        self.reason = ""

    @property
    def is_on(self) -> bool:
        """Is there anything to decide?"""
        return self.terms.policy != "all" or self.terms.provisions

    def machine(self, peer: PeerId) -> Machine | None:
        return (self.machines or {}).get(peer)

    def joins_active(self, peer: PeerId) -> bool:
        """Does a worker that comes now begin to work at once?"""
        if self.terms.policy == "all" or not self.is_settled or peer in self.auditors:
            return True
        machine = self.machine(peer)
        return machine is not None and machine.released_at is None and not machine.is_stopping

    def ready(self, peer: PeerId, now: float) -> None:
        """The worker has its first version."""
        machine = self.machine(peer)
        if machine is None:
            return
        record = self.records.get(machine.offer)
        if record is not None and machine.away_since is not None and not machine.is_adopted:
            record.lead_s.add(now - machine.since)
            record.num_failures = 0
        machine.is_adopted = True  # how long it takes was measured
        machine.away_since = None
