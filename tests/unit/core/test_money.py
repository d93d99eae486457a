"""What a run costs: hours at prices, and gigabytes that leave a machine."""

from __future__ import annotations

from typing import Any

import pytest
from core_builders import Scene, a_digest, a_running_scene, a_version

from echo2.core.membership import Worker
from echo2.core.money import standby_usd_per_h, usd_per_h
from echo2.core.settings import ActivationTerms, OfferTerms
from echo2.core.status import status
from echo2.messages import RelayReport
from echo2.types import LinkReport, PeerId

W = OfferTerms(name="w", usd_per_h=2.0, standby_usd_per_h=0.2, egress_usd_per_gb=1e9)


def a_worker(name: str, **changes: Any) -> Worker:
    scene = Scene()
    scene.worker_joins(name, **changes)
    worker = scene.state.members.get(PeerId(name))
    assert isinstance(worker, Worker)
    return worker


@pytest.mark.parametrize(
    ("name", "told", "active", "standby"),
    [
        ("w-1", {}, 2.0, 0.2),
        ("w-1", {"price_usd_per_h": 3.0}, 3.0, 0.2),
        ("w-1", {"standby_usd_per_h": 0.0}, 2.0, 0.0),
        ("w-x-1", {}, 5.0, 5.0),  # the longest name counts
        ("ww-1", {"price_usd_per_h": 1.0}, 1.0, 1.0),
        ("ww-1", {}, 0.0, 0.0),
    ],
)
def test_a_worker_costs_what_it_tells_or_its_offer(
    name: str, told: dict[str, float], active: float, standby: float
) -> None:
    terms = ActivationTerms(offers=(W, OfferTerms(name="w-x", usd_per_h=5.0)))
    worker = a_worker(name, **told)
    assert (usd_per_h(worker, terms), standby_usd_per_h(worker, terms)) == (active, standby)


def test_results_cost_the_egress_of_their_bytes() -> None:
    scene = a_running_scene(activation=ActivationTerms(offers=(W,)))
    before = scene.state.cost_usd
    (lease, *_) = scene.leases()
    message = scene.result(lease)
    scene.receive(scene.grantee[lease], message)
    tokens = sum(header.length for header in message.trajectories)
    assert scene.state.cost_usd - before == pytest.approx(9.0 * tokens)  # 1 $ a byte
    (told,) = status(scene.state, "")["workers"]
    assert told["usd_per_1000_rollouts"] == pytest.approx(
        1000 * told["cost_usd"] / len(message.trajectories)
    )


def a_report(num_bytes: int, *, of: str, step: int = 0) -> RelayReport:
    return RelayReport(
        manifest_digest=a_digest(a_version(step)),
        num_chunks=1,
        num_missing=0,
        links=(LinkReport(of, num_bytes, 1.0),),
    )


def test_what_is_forwarded_costs_its_sender_once_and_not_more_than_a_version_may() -> None:
    scene = a_running_scene(
        workers=(),
        activation=ActivationTerms(offers=(W,)),
        origin_egress_usd_per_gb=1e9,
        heartbeat_interval_s=1.0,
    )
    for name, key in (("w-1", "a"), ("w-2", "b")):
        endpoint = f"tcp://127.0.0.1:700{name[-1]}"
        scene.worker_joins(name, relay_endpoint=endpoint, relay_key=key * 40)

    def spent(report: RelayReport) -> float:
        before = scene.state.cost_usd
        scene.now += 5.0
        scene.receive("w-2", report)
        return float(scene.state.cost_usd - before)

    assert spent(a_report(4, of="origin")) == pytest.approx(4.0)
    assert spent(a_report(4, of="origin")) == 0.0  # told again
    assert spent(a_report(6, of="w-1")) == pytest.approx(2.0)
    assert scene.state.members.get(PeerId("w-1")).cost_usd == pytest.approx(2.0)
    assert spent(a_report(10**9, of="w-1")) == pytest.approx(14.0)  # the version has 10 bytes
    assert spent(a_report(10**9, of="w-1", step=7)) == 0.0  # no such version
