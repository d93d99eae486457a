"""Hosts of a dissemination, who can send to whom, and the bounds that no plan can beat.

A host has an uplink u and a downlink d in Mbit/s (10⁶ bits per second), a round trip in
seconds, and accepts inbound connections or only dials out. What was never measured is None
and stands for a stated default. Symbols as in docs/dissemination.md: G the bytes of the
version, n workers, u_0 the origin's uplink, u_i and d_i those of worker i.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

DEFAULT_UP_MBIT = 50.0
"""Uplink of a host whose uplink was never measured."""
DEFAULT_DOWN_MBIT = 200.0
"""Downlink of a host whose downlink was never measured."""
DEFAULT_RTT_S = 0.05
"""Round trip of a host whose round trip was never measured."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Host:
    """A host as it was measured; None is what was not (the defaults above stand in).

    `up_mbit` is the smaller of the measured rate and a configured cap; 0 for a worker that
    must forward nothing. `rtt_s` is the round trip to the origin (the origin's own is 0 or
    what its line adds). `accepts` says whether inbound connections reach the host.
    """

    name: str
    up_mbit: float | None = None
    down_mbit: float | None = None
    rtt_s: float | None = None
    accepts: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a host needs a name")
        for field, value, least in (
            ("up_mbit", self.up_mbit, 0.0),
            ("down_mbit", self.down_mbit, 1e-6),
            ("rtt_s", self.rtt_s, 0.0),
        ):
            if value is not None and not least <= value < 1e9:
                raise ValueError(
                    f"{field} of {self.name} is {value}; allowed is {least:g} to 1e9, "
                    "or None where it was never measured"
                )

    @property
    def up(self) -> float:
        """Uplink in Mbit/s, the default where it was never measured."""
        return DEFAULT_UP_MBIT if self.up_mbit is None else self.up_mbit

    @property
    def down(self) -> float:
        """Downlink in Mbit/s, the default where it was never measured."""
        return DEFAULT_DOWN_MBIT if self.down_mbit is None else self.down_mbit

    @property
    def rtt(self) -> float:
        """Round trip to the origin in seconds, the default where it was never measured."""
        return DEFAULT_RTT_S if self.rtt_s is None else self.rtt_s

    @property
    def measured(self) -> bool:
        """Whether both rates are measured ones."""
        return self.up_mbit is not None and self.down_mbit is not None


def megabits(num_bytes: int) -> float:
    return num_bytes * 8 / 1e6


def edge_rtt_s(one: Host, other: Host) -> float:
    """Round trip between two hosts, estimated from theirs to the origin: the larger one.

    The triangle inequality allows |a − b| to a + b; max(a, b) is the middle of that range.
    """
    return max(one.rtt, other.rtt)


def can_send(parent: Host, child: Host, *, is_origin: bool, blocked: Collection[Pair]) -> bool:
    """Can `parent` forward to `child`? One of them must accept a connection.

    The child dials a parent that accepts, the parent dials a child that accepts; the origin
    (`is_origin`, the parent) always accepts. `blocked` holds pairs known not to work, in
    either order.
    """
    if not (is_origin or parent.accepts or child.accepts) or parent.up <= 0:
        return False
    one, other = parent.name, child.name
    return not blocked or ((one, other) not in blocked and (other, one) not in blocked)


def fluid_bound(origin: Host, workers: Sequence[Host], num_bytes: int) -> tuple[float, str]:
    """(seconds, which term binds): T ≥ max(G/u_0, G/min d_i, nG/(u_0 + Σu_i)).

    The origin sends every byte at least once; the slowest downlink takes all of them; n
    copies leave uplinks, the origin's or a worker's. (Mundinger, Weber and Weiss, "Optimal
    scheduling of peer-to-peer file dissemination", 2008; Kumar and Ross, "Peer-assisted file
    distribution: the minimum distribution time", 2006.)
    """
    if not workers:
        return 0.0, "there are no workers"
    size = megabits(num_bytes)
    slowest = min(workers, key=lambda host: host.down)
    total = origin.up + sum(host.up for host in workers)
    terms = (
        (size / origin.up, f"the origin's uplink of {origin.up:g} Mbit/s"),
        (size / slowest.down, f"the downlink of {slowest.name}, {slowest.down:g} Mbit/s"),
        (
            len(workers) * size / total,
            f"the uplinks of all, {total:g} Mbit/s for {len(workers)} copies",
        ),
    )
    return max(terms, key=lambda term: term[0])


def reach_bound(
    origin: Host,
    workers: Sequence[Host],
    num_bytes: int,
    *,
    blocked: Collection[Pair] = frozenset(),
) -> tuple[float, str]:
    """The fluid bound, and what missing connections add to it (docs/dissemination.md).

    For any set of workers, its copies leave the uplinks of those who can send to one of them:
    T ≥ |X|G/Σ_{p → X} u_p. Taken for the dial-only workers, who can receive from the origin
    and from workers that accept, and for each worker alone. Every worker has a sender.
    """
    seconds, words = fluid_bound(origin, workers, num_bytes)
    size = megabits(num_bytes)
    sets = [[host for host in workers if not host.accepts]]
    sets += [[host] for host in workers] if blocked else []
    for members in sets:
        if not members:
            continue
        senders = [
            host
            for host in (origin, *workers)
            if any(
                can_send(host, member, is_origin=host is origin, blocked=blocked)
                for member in members
                if member is not host
            )
        ]
        serving = sum(host.up for host in senders)
        least_s = len(members) * size / serving
        if least_s > seconds * (1 + 1e-9):
            seconds = least_s
            who = (
                f"{len(members)} dial-only workers receive"
                if members is sets[0] and len(members) > 1
                else f"{members[0].name} receives"
            )
            others = len(senders) - (1 if origin in senders else 0)
            from_workers = f"{others} worker{'s' if others > 1 else ''}" if others else ""
            sources = " and ".join(
                [*(["the origin"] if origin in senders else []), *filter(None, [from_workers])]
            )
            words = f"{who} from {sources} at most, {serving:g} Mbit/s in all"
    return seconds, words
