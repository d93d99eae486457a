"""What workers tell the coordinator of their relays: where they are, and how fetches go.

    hello --> the endpoint is probed, the list of relays is told anew
    report -> rates of links; wrong chunks cost a relay its trust, silence is checked

Lists are told to all at most every LISTS_INTERVAL_S, so that a fleet that joins at once gets
few; to one worker also before it is told of a version whose part names others. At most
PROBES_MAX probes are under way. What stands in the records is told on change only.
"""

from __future__ import annotations

from typing import Final

from echo2.core.broadcast import Broadcast
from echo2.core.effects import ProbeRelay
from echo2.core.events import RelayProbed
from echo2.core.membership import Worker
from echo2.core.money import count_forwarded
from echo2.core.relay_rates import ORIGIN
from echo2.core.relay_standing import address_verdict, loopback_verdict
from echo2.core.run_state import RunState
from echo2.errors import RemoteProtocolError
from echo2.messages import RelayReport, VersionInstalled, WorkerHello
from echo2.types import PeerId

LISTS_INTERVAL_S: Final = 0.5
PROBES_MAX: Final = 64


class RelayDesk:
    """Keeps nothing of its own: what is known of relays is in `state.relays`."""

    def __init__(self, state: RunState) -> None:
        self.state = state

    # ---------------------------------------------------------------- coming, going

    def refusal(self, peer: PeerId, hello: WorkerHello) -> tuple[str, str] | None:
        """(reason, text) if the worker cannot be taken with this relay."""
        if hello.relay_endpoint:
            verdict = address_verdict(hello.relay_endpoint)
            if not verdict:
                return "relay_endpoint", verdict.reason
        key = self.state.verified_key
        if hello.relay_key and key is not None and hello.relay_key != key:
            return (
                "relay_key",
                f"worker {peer} came with the key {key[:8]}... and names {hello.relay_key[:8]}... "
                "as its relay's; a relay has the key of its worker, by which others know it; "
                "restart the worker with the key that is in the allow-list as its own",
            )
        for other in self.state.members.workers.values() if hello.relay_key else ():
            if other.relay_key == hello.relay_key and other.peer != peer:
                return (
                    "relay_key",
                    f"the relay key {hello.relay_key[:8]}... is that of worker {other.peer}, "
                    "which is here; each worker needs one of its own: give this one a folder "
                    "of its own, in which it makes a new key",
                )
        return None

    def joined(self, worker: Worker, *, was_here: bool) -> None:
        """The worker is a member (again)."""
        state, relays = self.state, self.state.relays
        relays.changed = True
        if worker.installed is not None:
            self._disseminated(state.broadcasts.leave_out(worker.peer, worker.installed))
        if not relays.has_relay(worker):
            if worker.peer in relays.standings:
                relays.standings[worker.peer].leave()
            return
        relays.stale.add(worker.peer)  # its process may be a new one
        standing = relays.standing(worker.peer)
        usable = loopback_verdict(worker.relay_endpoint, listens_on=state.settings.host)
        endpoint = worker.relay_endpoint if usable else ""
        standing.arrive(endpoint, was_here=was_here, now=state.now)
        if not usable:
            standing.reason = usable.reason
        self._probe_due([worker])

    def left(self, peer: PeerId) -> None:
        self.state.relays.leave(peer)
        self._disseminated(self.state.broadcasts.leave_out(peer))

    # ----------------------------------------------------------------------- probes

    def probed(self, event: RelayProbed) -> None:
        """A probe ended. One of an address that is no longer the worker's says nothing."""
        state, relays = self.state, self.state.relays
        worker = state.members.get(event.peer)
        standing = relays.standings.get(event.peer)
        if worker is None or standing is None or standing.endpoint != event.endpoint:
            return
        standing.answer(ok=event.ok, rtt_s=event.rtt_s, reason=event.reason)
        relays.changed = True
        if standing.told != (event.endpoint, event.ok):
            standing.told = (event.endpoint, event.ok)
            state.emit(
                "relay_probed",
                worker=event.peer,
                endpoint=event.endpoint,
                ok=event.ok,
                rtt_s=standing.rtt_s,
                reason=event.reason,
            )

    def tick(self) -> None:
        state, relays = self.state, self.state.relays
        self._probe_due(list(state.members.workers.values()))
        if state.now - relays.told_at < LISTS_INTERVAL_S:
            return
        relays.renew_list()
        if relays.stale:
            relays.told_at = state.now
        for peer in sorted(relays.stale):
            state.tell_relays(peer)

    def _probe_due(self, workers: list[Worker]) -> None:
        state, standings = self.state, self.state.relays.standings
        num_asked = -1
        for worker in workers:
            standing = standings.get(worker.peer)
            if standing is None or standing.due_at is None or state.now < standing.due_at:
                continue
            if num_asked < 0:
                num_asked = sum(found.is_asked(state.now) for found in standings.values())
            if standing.is_asked(state.now) or num_asked >= PROBES_MAX:
                continue
            num_asked += 1
            standing.ask(state.now)
            state.effects.append(ProbeRelay(worker.peer, standing.endpoint))

    # ---------------------------------------------------------------------- reports

    def report(self, peer: PeerId, message: RelayReport) -> None:
        """Take in how a fetch goes. More than REPORTS_PER_S of one worker are ignored."""
        state, relays = self.state, self.state.relays
        self._check(peer, message)
        state.members.heard(peer, state.now)
        if not relays.standing(peer).may_report(state.now):
            return
        count_forwarded(state, state.members.workers[peer], message)
        holders = [
            link.peer
            for link in message.links
            if (sender := state.members.get(PeerId(link.peer))) is not None
            and sender.installed is not None
            and state.lineage.published.get(sender.installed) == message.manifest_digest
        ]
        news = relays.rates.report(peer, message, holders=holders, now=state.now)
        for name, faults, silences in news:
            if name != ORIGIN:
                self._blame(PeerId(name), peer, faults, silences)

    def installed(self, peer: PeerId, message: VersionInstalled) -> None:
        state = self.state
        ended = {message.manifest_digest, *state.deltas.leading_to(message.manifest_digest)}
        state.relays.rates.installed(peer, ended, state.now)
        done = state.broadcasts.installed(
            message.version,
            peer,
            fetch_s=message.fetch_s,
            install_s=message.install_s,
            now=state.now,
        )
        self._disseminated([done] if done is not None else [])

    def _check(self, peer: PeerId, message: RelayReport) -> None:
        if self.state.members.get(peer) is None:
            raise RemoteProtocolError(
                f"{peer} is not known here: say hello first", reason="unknown_peer"
            )
        if message.num_missing > message.num_chunks:
            raise RemoteProtocolError(
                f"{peer} misses {message.num_missing} of {message.num_chunks} chunks",
                reason="wrong_report",
            )
        names = [link.peer for link in message.links]
        if len(set(names)) < len(names) or peer in names:
            what = "itself" if peer in names else "one peer twice"
            raise RemoteProtocolError(f"{peer} reports links to {what}", reason="wrong_report")
        for name in names:
            if name != ORIGIN and PeerId(name) not in self.state.relays.standings:
                raise RemoteProtocolError(
                    f"{peer} reports a link to {name}, which is no worker with a relay",
                    reason="unknown_relay",
                )

    def _blame(self, sender: PeerId, receiver: PeerId, faults: int, silences: int) -> None:
        state = self.state
        standing = state.relays.standing(sender)
        if silences:
            standing.call_silent(state.now)
        if faults and standing.call_faulty(receiver, faults):
            verdict = standing.forward_verdict(state.now)
            state.emit(
                "relay_distrusted",
                worker=sender,
                receivers=sorted(standing.faults),
                num_faults=sum(standing.faults.values()),
                reason=f"{verdict.reason}; it forwards nothing for the rest of the run",
            )

    def _disseminated(self, broadcasts: list[Broadcast]) -> None:
        for found in broadcasts:
            self.state.emit(
                "version_disseminated",
                incarnation=found.version.incarnation,
                step=found.version.step,
                num_workers=found.num_workers,
                t50_s=found.t_bcast_s(0.5),
                t90_s=found.t_bcast_s(0.9),
                t100_s=found.t_bcast_s(1.0),
                predicted_s=found.predicted_s,
                bound_s=found.bound_s,
            )
