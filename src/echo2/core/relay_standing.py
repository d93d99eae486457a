"""What the coordinator makes of one worker's relay: is it reached, is it trusted.

    hello --> probed --> accepts connections          (probed again when others call it silent)
                 `-----> only dials                   (probed again, ever more rarely)

Both forward. Three things stop a relay from forwarding, though it still receives: chunks that
were not those asked for (for the rest of the run), silence that a probe confirms (until one
succeeds), and silence of one that cannot be probed (for SILENT_REST_S).

Outlives the worker's presence: who comes back is measured and trusted as before.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Final

from echo2.core.staleness import ALLOWED, Verdict
from echo2.types import PeerId

PROBE_WAIT_S: Final = 1.0
"""Least time between two probes of a relay; doubled with each one that was not the last."""
PROBE_WAIT_MAX_S: Final = 300.0
FIRST_PROBE_PATIENCE_S: Final = 2.0
"""A plan waits so long for the first answers of those who came."""
PROBE_PATIENCE_S: Final = 10.0
"""A probe that is not answered by then is counted as lost."""
SILENT_REST_S: Final = 60.0
FAULTS_MAX: Final = 3
"""So many wrong chunks, reported by one receiver, are enough; as is one by each of two."""
REPORTS_PER_S: Final = 4.0
REPORTS_BURST: Final = 8.0


@dataclass(slots=True)
class Standing:
    """`accepts`: the last probe of `endpoint` reached it, with round trip `rtt_s`; else
    `reason` says why not. `due_at`: when to probe next; `asked_at`: a probe is under way since.
    `answered`: a probe of `endpoint` ended since the worker arrived.
    `silent`: reported silent, and the probe after that failed. `faults` by receiver."""

    endpoint: str = ""
    accepts: bool = False
    reason: str = ""
    rtt_s: float | None = None
    due_at: float | None = None
    asked_at: float | None = None
    last_asked_at: float = float("-inf")
    arrived_at: float = float("-inf")
    answered: bool = False
    tries: int = 0
    suspected: bool = False
    silent: bool = False
    rests_until: float = float("-inf")
    faults: dict[PeerId, int] = field(default_factory=dict)
    distrusted: bool = False
    told: tuple[str, bool] | None = None
    """(endpoint, accepts) as it stands in the records."""
    reports_left: float = REPORTS_BURST
    reported_at: float = 0.0
    reports_ignored: int = 0

    # ----------------------------------------------------------------------- probes

    def arrive(self, endpoint: str, *, was_here: bool, now: float) -> None:
        """The worker said hello. A relay that stood as reached, and never left, still does."""
        if self.endpoint == endpoint and self.accepts and was_here:
            return
        if self.endpoint != endpoint:
            self.tries = 0
            self.asked_at = None
            self.silent = self.suspected = False
        self.endpoint, self.accepts, self.rtt_s = endpoint, False, None
        self.reason = "not probed yet" if endpoint else "it only dials"
        self.arrived_at, self.answered = now, False
        self.due_at = max(now, self.last_asked_at + PROBE_WAIT_S) if endpoint else None

    def leave(self) -> None:
        self.accepts, self.due_at, self.asked_at = False, None, None
        self.reason = "not here"

    def is_asked(self, now: float) -> bool:
        """Is a probe under way?"""
        return self.asked_at is not None and now - self.asked_at < PROBE_PATIENCE_S

    def is_awaited(self, now: float) -> bool:
        """Will it be known in a moment whether others reach it?"""
        fresh = now - self.arrived_at < FIRST_PROBE_PATIENCE_S
        return bool(self.endpoint) and not self.answered and fresh

    def ask(self, now: float) -> None:
        """A probe begins."""
        if now - self.last_asked_at > 2 * PROBE_WAIT_MAX_S:
            self.tries = 0
        self.asked_at = self.last_asked_at = now
        self.due_at = now + PROBE_PATIENCE_S
        self.tries += 1

    def answer(self, *, ok: bool, rtt_s: float | None, reason: str) -> None:
        """A probe of the present endpoint ended."""
        self.asked_at, self.answered = None, True
        self.accepts, self.rtt_s, self.reason = ok, rtt_s if ok else None, "" if ok else reason
        self.silent = self.suspected and not ok
        self.suspected = self.silent
        self.due_at = None if ok else self.last_asked_at + self._wait_s

    def call_silent(self, now: float) -> None:
        """A receiver took it for dead."""
        if not self.accepts:
            self.rests_until = now + SILENT_REST_S
        elif not self.suspected:
            self.suspected = True
            self.due_at = max(now, self.last_asked_at + self._wait_s)

    @property
    def _wait_s(self) -> float:
        return float(min(PROBE_WAIT_S * 2.0 ** min(self.tries, 16), PROBE_WAIT_MAX_S))

    # ------------------------------------------------------------------------ trust

    def call_faulty(self, receiver: PeerId, count: int) -> bool:
        """`receiver` got `count` wrong chunks. True if that made it distrusted, now."""
        if self.distrusted:
            return False
        self.faults[receiver] = self.faults.get(receiver, 0) + count
        self.distrusted = len(self.faults) > 1 or self.faults[receiver] >= FAULTS_MAX
        return self.distrusted

    def forward_verdict(self, now: float) -> Verdict:
        """May it forward?"""
        if self.distrusted:
            senders = ", ".join(sorted(self.faults)[:4])
            return Verdict(ok=False, reason=f"it sent wrong chunks to {senders}")
        if self.silent:
            return Verdict(ok=False, reason=f"it fell silent, and {self.reason}")
        if now < self.rests_until:
            rest_s = self.rests_until - now
            return Verdict(ok=False, reason=f"it fell silent; {rest_s:.0f} s until it may again")
        return ALLOWED

    # ---------------------------------------------------------------------- reports

    def may_report(self, now: float) -> bool:
        """One report is used up: REPORTS_PER_S, and up to REPORTS_BURST at once."""
        gained = (now - self.reported_at) * REPORTS_PER_S
        self.reports_left = min(REPORTS_BURST, self.reports_left + gained)
        self.reported_at = now
        if self.reports_left < 1.0:
            self.reports_ignored += 1
            return False
        self.reports_left -= 1.0
        return True


def address_verdict(endpoint: str) -> Verdict:
    """Is it an address at all that others could connect to? False for wildcards and ports out
    of range, whose hello is refused."""
    host, port = host_and_port(endpoint)
    address = _address(host)
    if not 0 < port < 65536:
        return Verdict(
            ok=False,
            reason=f"the relay endpoint {endpoint} has port {port}; allowed are 1 to 65535",
        )
    if not host.strip("0.") or (address and (address.is_unspecified or address.is_multicast)):
        return Verdict(
            ok=False,
            reason=f"the relay endpoint {endpoint} names no host that one can connect to; set "
            "worker.relay_endpoint to an address of this machine that other workers reach",
        )
    return ALLOWED


def loopback_verdict(endpoint: str, *, listens_on: str) -> Verdict:
    """Loopback is one machine's own: it means something to others only where the coordinator
    listens there too, so that all workers are on that machine."""
    host = host_and_port(endpoint)[0] if endpoint else ""
    if is_loopback(host) and not is_loopback(listens_on):
        return Verdict(
            ok=False,
            reason=f"{endpoint} is reached from its own machine alone, and the coordinator "
            f"listens on {listens_on}; set worker.relay_endpoint to let others connect",
        )
    return ALLOWED


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Of "tcp://HOST:PORT", with an IPv6 host in brackets or without."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    address = _address(host.strip("[]"))
    return host.lower().rstrip(".") == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address
