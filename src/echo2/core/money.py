"""What the run costs, counted from tick to tick: prices of those that are here times hours.

An active worker costs its price, one that stands by its standby price, a machine that was started
its offer's price from the order until it is gone, the learner its own while it has its seat.
A worker's price is the one that it told; where it told none, its offer's.
"""

from __future__ import annotations

from echo2.core.membership import Worker
from echo2.core.run_state import RunState
from echo2.core.settings import ActivationTerms

GB = 1e9


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


def usd_per_1000(worker: Worker) -> float | None:
    """Dollars per 1000 trajectories that were delivered; None before the first."""
    if not worker.num_trajectories:
        return None
    return 1000.0 * worker.cost_usd / worker.num_trajectories
