"""Who is here."""

from __future__ import annotations

import pytest
from core_builders import a_version

from echo2.core.membership import Members, Worker, WorkerState
from echo2.types import PeerId


def a_worker(name: str = "w-1", *, heard_at: float = 0.0) -> Worker:
    return Worker(
        peer=PeerId(name),
        engine="null",
        precision="f32",
        on_update="finish",
        slots=1,
        price_usd_per_h=0.0,
        environment_version="",
        joined_at=0.0,
        heard_at=heard_at,
    )


def members_of(*workers: Worker) -> Members:
    members = Members()
    members.workers.update({worker.peer: worker for worker in workers})
    return members


def test_a_worker_that_is_silent_is_suspect_whatever_it_did() -> None:
    worker = a_worker()
    assert worker.state_name == "syncing"
    worker.suspect = True
    assert worker.state_name == "suspect"


@pytest.mark.parametrize(
    ("state", "suspect", "installed", "may"),
    [
        (WorkerState.READY, False, True, True),
        (WorkerState.READY, True, True, False),
        (WorkerState.READY, False, False, False),
        (WorkerState.SYNCING, False, True, False),
        (WorkerState.DRAINING, False, True, False),
    ],
)
def test_only_a_ready_worker_with_a_version_may_get_a_lease(state, suspect, installed, may) -> None:
    worker = a_worker()
    worker.state, worker.suspect = state, suspect
    worker.installed = a_version(0) if installed else None
    assert worker.may_lease is may
    assert members_of(worker).ready() == ([worker] if may else [])


def test_a_node_that_samples_nothing_gets_no_lease() -> None:
    worker = a_worker()
    worker.engine, worker.state, worker.installed = "none", WorkerState.READY, a_version(0)
    assert not worker.may_lease
    assert not members_of(worker).ready()


def test_a_sign_of_life_is_noted_and_never_goes_back() -> None:
    worker = a_worker(heard_at=5.0)
    worker.suspect = True
    members = members_of(worker)
    assert members.heard(PeerId("w-1"), 3.0) is worker
    assert (worker.heard_at, worker.suspect) == (5.0, False)
    members.heard(PeerId("w-1"), 7.0)
    assert worker.heard_at == 7.0


def test_strangers_are_not_heard() -> None:
    members = members_of()
    assert members.heard(PeerId("w-9"), 1.0) is None
    assert members.get(PeerId("w-9")) is None


def test_a_worker_is_silent_when_nothing_was_heard_for_longer() -> None:
    worker = a_worker(heard_at=10.0)
    members = members_of(worker)
    assert members.silent(15.0, longer_than_s=5.0) == []
    assert members.silent(15.1, longer_than_s=5.0) == [worker]
