"""What the run costs, counted from tick to tick: prices of those that are here times hours.

An active worker costs its price, one that stands by its standby price, a machine that was started
its offer's price from the order until it is gone, the learner its own while it has its seat.
A worker's price is the one that it told; where it told none, its offer's.

Egress, where a price is given: results by the tokens that they hold, versions by what receivers
report of each link. A receiver is not believed more than twice the newest version, once for each
artifact that leads to it: what others are to pay is not its to make up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from echo2.core.membership import Worker
from echo2.core.relay_rates import ORIGIN
from echo2.core.run_state import RunState
from echo2.core.settings import ActivationTerms
from echo2.messages import RelayReport
from echo2.types import PeerId, TrajectoryHeader

GB: Final = 1e9
TOKEN_BYTES: Final = 9
"""Of a result: int32 token, float32 logprob, one byte of mask."""
BELIEVED: Final = 2


def usd_per_h(worker: Worker, terms: ActivationTerms) -> float:
    """While it is active."""
    offer = terms.offer_of(worker.peer)
    if worker.price_usd_per_h or offer is None:
        return worker.price_usd_per_h
    return offer.usd_per_h


def standby_usd_per_h(worker: Worker, terms: ActivationTerms) -> float:
    """While it stands by: what it told, or its offer tells; else as much as while it works."""
    if worker.standby_usd_per_h is not None:
        return worker.standby_usd_per_h
    offer = terms.offer_of(worker.peer)
    if offer is not None and offer.standby_usd_per_h is not None:
        return offer.standby_usd_per_h
    return usd_per_h(worker, terms)


def count_cost(state: RunState) -> None:
    """Of the time since it was counted before."""
    terms, machines = state.settings.activation, state.activation.machines or {}
    hours = (state.now - (state.costed_at or 0.0)) / 3600.0
    state.costed_at = state.now
    total = state.settings.learner_usd_per_h if state.seat.peer is not None else 0.0
    for worker in state.members.workers.values():
        if worker.active or worker.peer in machines:
            rate = usd_per_h(worker, terms)
        else:
            rate = standby_usd_per_h(worker, terms)
        worker.cost_usd += rate * hours
        total += rate
    for machine in machines.values():
        offer = terms.offer(machine.offer)
        if offer is not None and machine.worker not in state.members.workers:
            total += offer.usd_per_h
    state.cost_usd += total * hours


def count_result(state: RunState, worker: Worker, trajectories: Iterable[TrajectoryHeader]) -> None:
    """What it costs that a result left the worker's machine."""
    _pay(state, worker.peer, TOKEN_BYTES * sum(header.length for header in trajectories))


def count_forwarded(state: RunState, receiver: Worker, report: RelayReport) -> None:
    """What it costs that a version left the origin and the relays that the receiver names."""
    newest = state.lineage.newest
    if newest is None or newest not in state.announcements:
        return
    digest = state.lineage.published[newest]
    known = {digest, *state.deltas.leading_to(digest)}
    if report.manifest_digest not in known:
        return
    receiver.fetched = {d: n for d, n in receiver.fetched.items() if d in known}
    told = sum(link.num_bytes for link in report.links)
    believed = min(told, BELIEVED * state.announcements[newest].num_bytes)
    grown = believed - receiver.fetched.get(report.manifest_digest, 0)
    if grown <= 0:
        return
    receiver.fetched[report.manifest_digest] = believed
    for link in report.links:
        _pay(state, link.peer, grown * link.num_bytes / told)


def _pay(state: RunState, sender: str, num_bytes: float) -> None:
    if sender == ORIGIN:
        price, worker = state.settings.origin_egress_usd_per_gb, None
    else:
        offer = state.settings.activation.offer_of(sender)
        price = 0.0 if offer is None else offer.egress_usd_per_gb
        worker = state.members.get(PeerId(sender))
    if price:
        usd = price * num_bytes / GB
        state.cost_usd += usd
        if worker is not None:
            worker.cost_usd += usd


def usd_per_1000(worker: Worker) -> float | None:
    """Dollars per 1000 trajectories that were delivered; None before the first."""
    if not worker.num_trajectories:
        return None
    return 1000.0 * worker.cost_usd / worker.num_trajectories
