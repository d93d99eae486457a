"""Which workers are active, which machines are on: the estimates that the policy decides over.

At most once a second, from `Tick`:

    wanted rate  R / T_train · boost      T_train: measured, or plan.train_s before
    a worker     slots / latency of its leases, in groups/s, with the error of that mean
    never measured: mean of its offer's workers, else the offer's rate, else the fleet's by slots

`boost` rises by a twentieth with each learner step before which the learner waited for more than
WAIT_SHARE_MAX of the time although the pool makes the wanted rate, up to BOOST_MAX, and falls back
slowly: what R / T_train leaves out (installs, stragglers, a synchronous run) shows in that wait.

Until rates and T_train are known every worker is active, and a provisioner starts one machine, the
cheapest. `ActivationPolicy` decides then. Whoever it releases gets no new lease; a machine is
stopped when its last lease has ended. At no time is everybody standing by.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from echo2.core.activation_policy import ActivationDecision, ActivationPolicy, WorkerEstimate
from echo2.core.effects import StartMachine, StopMachine
from echo2.core.events import MachineChanged, MachinesFound
from echo2.core.machines import Machine
from echo2.core.membership import RELAY_ENGINE, Worker, WorkerState
from echo2.core.money import standby_usd_per_h, usd_per_h
from echo2.core.run_state import RunState
from echo2.core.settings import OfferTerms
from echo2.types import PeerId

LOOK_EACH_S: Final = 1.0
SAMPLES_MAX: Final = 9
"""An estimate forgets: it is as sure as the mean of so many, (2 - w) / w of its weight w."""
DEVIATION: Final = 1.2533
"""Standard deviation over mean absolute deviation, of a normal distribution."""
LATENCY_FLOOR_S: Final = 1e-3
WAIT_SHARE_MAX: Final = 0.05
BOOST_STEP: Final = 1.05
BOOST_FALL: Final = 0.99
BOOST_MAX: Final = 2.0
DRAIN_MAX_S: Final = 300.0
"""A released machine is stopped after so long, though its worker has a lease still."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """Means of what was measured, in groups/s: by offer, and of one slot of the fleet."""

    by_offer: dict[str, float]
    per_slot: float | None


class ActivationDesk:
    def __init__(self, state: RunState) -> None:
        self.state = state
        self.terms = state.settings.activation
        self.policy = ActivationPolicy(self.terms.settings)
        self._looked_at = -math.inf
        self._waits_seen = 0

    # ----------------------------------------------------------------------- machines

    def found(self, event: MachinesFound) -> None:
        """Adopt what is on, and stop what is not; what is not written down is gone."""
        state, activation = self.state, self.state.activation
        known = activation.machines or {}
        machines: dict[PeerId, Machine] = {}
        for each in event.machines:
            machine = known.get(each.worker)
            if machine is None:
                worker = state.members.get(each.worker)
                away = None if worker is not None and worker.could_lease else state.now
                machine = Machine(each.worker, each.offer, state.now, away, is_adopted=True)
            machine.is_running = True
            machines[each.worker] = machine
            if not each.is_on or machine.is_stopping:
                machine.is_stopping = True
                state.effects.append(StopMachine(machine.worker))
            if each.worker not in known:
                self._tell(machine, "was written down before")
        activation.machines = machines

    def changed(self, event: MachineChanged) -> None:
        activation = self.state.activation
        machine = activation.machine(event.worker)
        if machine is None or activation.machines is None:
            if event.state == "running":  # given up here
                self.state.effects.append(StopMachine(event.worker))
            return
        machine.text = event.text
        if event.state == "running":
            machine.is_running = True
        elif event.state == "stopping":
            machine.is_stopping = True
        elif event.state == "gone":
            del activation.machines[event.worker]
            if event.text and event.worker not in self.state.members.workers:
                self._offer_failed(machine)
        self.state.emit(
            "machine_changed",
            worker=machine.worker,
            offer=machine.offer,
            state="gone" if event.state == "gone" else machine.state_name,
            reason=event.text,
        )

    def _look_at_machines(self) -> None:
        state = self.state
        for machine in list((state.activation.machines or {}).values()):
            if machine.is_stopping:
                continue
            worker = state.members.get(machine.worker)
            if worker is not None and worker.installed is not None:
                machine.away_since = None
            elif machine.away_since is None:
                machine.away_since = state.now
            away_s = 0.0 if machine.away_since is None else state.now - machine.away_since
            if away_s > self.terms.ready_timeout_s:
                self._offer_failed(machine)
                self._stop(machine, f"its worker was not ready for {away_s:.0f} s")
            elif machine.released_at is not None:
                leases = state.book.num_leases(machine.worker)
                leases += state.evals.num_leases(machine.worker)
                if not leases or state.now - machine.released_at > DRAIN_MAX_S:
                    self._stop(machine, "released")

    def _offer_failed(self, machine: Machine) -> None:
        record = self.state.activation.records.get(machine.offer)
        if record is not None:
            record.failed(self.state.now)

    def _stop(self, machine: Machine, reason: str) -> None:
        machine.is_stopping = True
        self.state.effects.append(StopMachine(machine.worker))
        self._tell(machine, reason)

    def _start(self, offer: str, reason: str) -> None:
        state, activation = self.state, self.state.activation
        assert activation.machines is not None
        name = PeerId(f"{offer}-{state.settings.life}-{activation.next_number}")
        activation.next_number += 1
        machine = Machine(name, offer, state.now, state.now)
        activation.machines[name] = machine
        state.effects.append(StartMachine(name, offer))
        self._tell(machine, reason)

    def _tell(self, machine: Machine, reason: str) -> None:
        self.state.emit(
            "machine_changed",
            worker=machine.worker,
            offer=machine.offer,
            state=machine.state_name,
            reason=reason,
        )

    # ----------------------------------------------------------------------- decisions

    def tick(self) -> None:
        state, activation = self.state, self.state.activation
        if not activation.is_on:
            return
        self._never_none()
        if state.now - self._looked_at < LOOK_EACH_S:
            return
        self._looked_at = state.now
        self._look_at_machines()
        if self.terms.provisions and activation.machines is None:
            activation.reason = "it is not known yet which machines are on"
            return
        if self.terms.policy == "all":
            for name in self._candidates():
                self._start(name.partition("#")[0], 'activation.policy is "all"')
            activation.reason = "all are active"
            return
        rates = self._rates()
        estimates = self._estimates(rates)
        wanted = self._wanted_rate()
        if wanted is None or estimates is None:
            activation.is_settled = False
            activation.reason = "rates or T_train are not measured yet: all are active"
            self._begin()
            return
        activation.is_settled = True
        activation.wanted_rate = wanted
        decision = self.policy.decide(state.now, wanted * activation.boost, estimates)
        self._note_wait(decision)
        activation.reason = decision.reason
        self._carry_out(decision)

    def _begin(self) -> None:
        """Something must be measured first."""
        state, activation = self.state, self.state.activation
        for worker in state.members.workers.values():
            if not worker.active:
                self._activate(worker, activation.reason)
        on = [m for m in (activation.machines or {}).values() if not m.is_stopping]
        samples = any(w.engine != RELAY_ENGINE for w in state.members.workers.values())
        if on or samples:
            return
        names = self._candidates()
        if names:
            offers = [o for n in names if (o := self.terms.offer(n.partition("#")[0])) is not None]
            cheapest = min(offers, key=lambda o: o.usd_per_h / (o.rate or 1.0))
            self._start(cheapest.name, "nothing is measured yet, and nobody is here")

    def _never_none(self) -> None:
        """If nobody who is active is ready, somebody who stands by works."""
        workers = [worker for worker in self.state.members.workers.values() if worker.could_lease]
        if workers and not any(worker.active for worker in workers):

            def price_per_slot(worker: Worker) -> float:
                return usd_per_h(worker, self.terms) / worker.slots

            self._activate(min(workers, key=price_per_slot), "nobody who is active is ready")

    def _wanted_rate(self) -> float | None:
        busy_s = self.state.busy_s
        train_s = busy_s.mean if busy_s.known else self.terms.train_s
        if train_s is None:
            return None
        return self.state.settings.groups_per_step / max(train_s, LATENCY_FLOOR_S)

    def _note_wait(self, decision: ActivationDecision) -> None:
        """Once for each batch that was granted: did the learner wait for what should suffice?"""
        state, activation = self.state, self.state.activation
        if state.wait_s.count == self._waits_seen:
            return
        self._waits_seen = state.wait_s.count
        waiting_s, busy_s = state.wait_s.mean, state.busy_s.mean
        share = waiting_s / (waiting_s + busy_s) if waiting_s + busy_s > 0 else 0.0
        if share > WAIT_SHARE_MAX and not decision.reason.startswith("short"):
            activation.boost = min(BOOST_MAX, activation.boost * BOOST_STEP)
        elif share <= WAIT_SHARE_MAX / 2:
            activation.boost = max(1.0, activation.boost * BOOST_FALL)

    def _carry_out(self, decision: ActivationDecision) -> None:
        state = self.state
        for name in decision.activate:
            offer, is_candidate, _ = name.partition("#")
            worker = state.members.get(PeerId(name))
            if is_candidate:
                self._start(offer, decision.reason)
            elif worker is not None:
                self._activate(worker, decision.reason)
        for name in decision.release:
            worker = state.members.get(PeerId(name))
            machine = state.activation.machine(PeerId(name))
            if worker is not None:
                worker.active = False
                state.emit("worker_released", worker=worker.peer, reason=decision.reason)
            if machine is not None:
                machine.released_at = state.now

    def _activate(self, worker: Worker, reason: str) -> None:
        worker.active = True
        machine = self.state.activation.machine(worker.peer)
        if machine is not None:
            machine.released_at = None
        self.state.emit("worker_activated", worker=worker.peer, reason=reason)

    # ----------------------------------------------------------------------- estimates

    def _rates(self) -> _Rates:
        by_offer: defaultdict[str, list[float]] = defaultdict(list)
        rates, slots = [], 0
        for worker in self.state.members.workers.values():
            if worker.latency_s.known:
                rates.append(_measured_rate(worker))
                slots += worker.slots
                offer = self.terms.offer_of(worker.peer)
                if offer is not None:
                    by_offer[offer.name].append(rates[-1])
        means = {name: math.fsum(found) / len(found) for name, found in by_offer.items()}
        return _Rates(means, math.fsum(rates) / slots if slots else None)

    def _estimates(self, rates: _Rates) -> list[WorkerEstimate] | None:
        """All that could be active; None while a rate of one of them is not known at all."""
        state, activation = self.state, self.state.activation
        found = []
        for worker in state.members.workers.values():
            if worker.engine == RELAY_ENGINE:
                continue
            machine = activation.machine(worker.peer)
            if machine is not None and machine.is_stopping:
                continue
            offer = self.terms.offer_of(worker.peer)
            prior = _prior(offer, worker.slots, rates)
            if prior is None:
                return None
            mean = _measured_rate(worker) if worker.latency_s.known else 0.0
            spread = worker.latency_s.deviation / max(worker.latency_s.mean, LATENCY_FLOOR_S)
            is_here = worker.state is not WorkerState.DRAINING and not worker.suspect
            found.append(
                WorkerEstimate(
                    name=worker.peer,
                    prior_rate=prior,
                    usd_per_h=usd_per_h(worker, self.terms),
                    standby_usd_per_h=(
                        0.0 if machine is not None else standby_usd_per_h(worker, self.terms)
                    ),
                    rate_mean=mean,
                    rate_deviation=DEVIATION * spread * mean,
                    num_samples=min(SAMPLES_MAX, worker.latency_s.count),
                    is_here=is_here,
                    is_active=worker.active,
                    may_leave=worker.peer not in activation.auditors,
                )
            )
        for machine in (activation.machines or {}).values():
            if machine.worker not in state.members.workers and not machine.is_stopping:
                counts = machine.released_at is None
                offer = self.terms.offer(machine.offer)
                if offer is not None:
                    found.append(self._of_offer(machine.worker, offer, rates, is_active=counts))
        for name in self._candidates():
            offer = self.terms.offer(name.partition("#")[0])
            assert offer is not None
            found.append(self._of_offer(name, offer, rates, is_active=False))
        return None if any(estimate.prior_rate < 0 for estimate in found) else found

    def _of_offer(
        self, name: str, offer: OfferTerms, rates: _Rates, *, is_active: bool
    ) -> WorkerEstimate:
        prior = _prior(offer, 1, rates)
        return WorkerEstimate(
            name=name,
            prior_rate=-1.0 if prior is None else prior,
            usd_per_h=offer.usd_per_h,
            is_active=is_active,
        )

    def _candidates(self) -> list[str]:
        """Machines that could be started now, as OFFER#1 and so on."""
        machines = self.state.activation.machines
        if not self.terms.provisions or machines is None:
            return []
        room = self.terms.machines_max - len(machines)
        names: list[str] = []
        for offer in self.terms.offers:
            if self.state.now < self.state.activation.records[offer.name].rests_until:
                continue
            taken = sum(machine.offer == offer.name for machine in machines.values())
            free = max(0, min(offer.count - taken, room - len(names)))
            names.extend(f"{offer.name}#{i + 1}" for i in range(free))
        return names


def _measured_rate(worker: Worker) -> float:
    """Groups/s with all slots busy."""
    return worker.slots / max(worker.latency_s.mean, LATENCY_FLOOR_S)


def _prior(offer: OfferTerms | None, slots: int, rates: _Rates) -> float | None:
    if offer is not None:
        known = rates.by_offer.get(offer.name, offer.rate)
        if known is not None:
            return known
    return None if rates.per_slot is None else rates.per_slot * slots
