"""Evals on their own: pinned to a version, bounded attempts, n of N."""

from __future__ import annotations

from core_builders import LEARNER, a_header, a_task, a_version

from echo2.core.evals import EVAL_ATTEMPTS_MAX, EVALS_MAX, Eval, EvalLease, Evals
from echo2.messages import EvalRequest
from echo2.types import LeaseId, PeerId, Sampling

V0, V1 = a_version(0), a_version(1)
W1, W2 = PeerId("w-1"), PeerId("w-2")


def begun(evals: Evals, eval_id: str = "e", *, version=V0, tasks: int = 2) -> Eval:
    request = EvalRequest(
        incarnation=1,
        eval_id=eval_id,
        version=version,
        tasks=tuple(a_task(index) for index in range(tasks)),
        sampling=Sampling(),
    )
    return evals.begin(request, LEARNER, 0.0)


def granted(evals: Evals, found: Eval, name: str, *, worker: PeerId = W1) -> LeaseId:
    lease = EvalLease(
        id=LeaseId(name),
        eval_id=found.request.eval_id,
        task=found.pending.popleft(),
        worker=worker,
        granted_at=0.0,
        progressed_at=0.0,
    )
    evals.grant(found, lease)
    return lease.id


def test_an_eval_waits_for_a_worker_of_its_version_the_oldest_first() -> None:
    evals = Evals()
    first = begun(evals, "a")
    begun(evals, "b")
    other = begun(evals, "c", version=V1)
    assert evals.next_for(V0) is first
    assert evals.next_for(V1) is other
    assert evals.next_for(a_version(5)) is None
    assert evals.pending_versions() == {V0, V1}


def test_an_eval_whose_tasks_are_out_waits_for_no_worker() -> None:
    evals = Evals()
    found = begun(evals, tasks=1)
    granted(evals, found, "l.1")
    assert evals.next_for(V0) is None
    assert evals.pending_versions() == set()
    assert not found.is_done


def test_leases_are_counted_by_worker() -> None:
    evals = Evals()
    found = begun(evals, tasks=3)
    one, two = granted(evals, found, "l.1"), granted(evals, found, "l.2")
    granted(evals, found, "l.3", worker=W2)
    assert (evals.num_leases(W1), evals.num_leases(W2)) == (2, 1)
    assert [lease.id for lease in evals.leases_of(W1)] == [one, two]
    evals.give_back(one, "x")
    assert evals.num_leases(W1) == 1
    evals.give_back(two, "x")
    assert evals.leases_of(W1) == []


def test_scores_make_the_result() -> None:
    evals = Evals()
    found = begun(evals, tasks=2)
    trajectories = (a_header(V0, reward=0.0), a_header(V0, reward=1.0, tokens=4))
    assert evals.score(granted(evals, found, "l.1"), trajectories) is found
    evals.score(granted(evals, found, "l.2"), (a_header(V0, reward=1.0),))
    assert found.is_done
    result = found.result()
    assert (result.num_asked, result.num_done) == (2, 2)
    assert (result.reward_mean, result.tokens_mean, result.reason) == (0.75, 2.5, "")
    assert list(evals.done()) == [found]
    assert not evals.evals


def test_a_lease_given_back_waits_again_until_its_attempts_are_used_up() -> None:
    evals = Evals()
    found = begun(evals, tasks=1)
    for attempt in range(1, EVAL_ATTEMPTS_MAX):
        evals.give_back(granted(evals, found, f"l.{attempt}"), "lost")
        assert found.attempts == {0: attempt}
        assert len(found.pending) == 1
    evals.give_back(granted(evals, found, "l.9"), "lost at last")
    assert (found.num_failed, found.is_done) == (1, True)
    result = found.result()
    assert (result.num_done, result.reward_mean, result.tokens_mean) == (0, None, None)
    assert result.reason == "1 of 1 not done: lost at last"


def test_a_lease_that_is_unknown_is_not_given_back() -> None:
    evals = Evals()
    found = begun(evals)
    evals.give_back(LeaseId("l.9"), "x")
    assert found.last_reason == ""
    assert evals.of_lease(LeaseId("l.9")) is None


def test_a_cancelled_eval_says_how_many_of_how_many() -> None:
    evals = Evals()
    found = begun(evals, tasks=3)
    evals.score(granted(evals, found, "l.1"), (a_header(V0),))
    granted(evals, found, "l.2")
    assert evals.cancel("e", "no worker serves 1.0 any more") is found
    assert found.is_done
    assert evals.num_leases(W1) == 0
    assert not evals.lease_eval
    assert found.result().reason == "2 of 3 not done: no worker serves 1.0 any more"


def test_an_eval_under_way_is_not_done() -> None:
    evals = Evals()
    begun(evals)
    assert list(evals.done()) == []
    assert "e" in evals.evals


def test_the_last_results_are_remembered() -> None:
    evals = Evals()
    for i in range(EVALS_MAX + 1):
        evals.remember(begun(evals, f"e{i}").result())
    assert len(evals.ended) == EVALS_MAX
    assert "e0" not in evals.ended
