"""Every promise that `echo2 verify` names is broken here, and found by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.verify import verify_run

ARun = Any
"""The healthy run of conftest.py."""
Fields = dict[str, Any]
Plant = Callable[[ARun], object]


def _end(group: str, **fields: Any) -> Plant:
    return lambda run: run.find("group_ended", group_id=group).update(fields)


def _event(event: str, where: Fields, **fields: Any) -> Plant:
    return lambda run: run.find(event, **where).update(fields)


def _metric(step: int, **fields: Any) -> Plant:
    return lambda run: run.line(step).update(fields)


def _drop(event: str, **where: Any) -> Plant:
    return lambda run: run.remove(event, **where)


def _without(name: str) -> Plant:
    return lambda run: run.line(5).pop(name)


def _drop_metric(step: int) -> Plant:
    return lambda run: run.metrics.remove(run.line(step))


def _repeat(event: str, **where: Any) -> Plant:
    return lambda run: run.insert_before(run.find("run_finished"), **run.find(event, **where))


def _before_end(event: str, **fields: Any) -> Plant:
    return lambda run: run.insert_before(run.find("run_finished"), event, **fields)


def _config(old: str, new: str) -> Plant:
    def plant(run: ARun) -> None:
        assert old in run.config
        run.config = run.config.replace(old, new)

    return plant


def _torn(name: str) -> Plant:
    return lambda run: run.last_bytes.update({name: b'{"time": 12'})


def _line_in_the_middle(run: ARun) -> None:
    run.events.insert(5, ["not", "an", "object"])


def _start_missing(run: ARun) -> None:
    run.remove("run_started")


def _second_run_id(run: ARun) -> None:
    run.insert_before(run.find("run_finished"), **{**run.find("run_started"), "run_id": "r2"})


def _expired(run: ARun) -> None:
    run.find("group_ended", group_id="g11").update(end="expired")


def _fewer_groups(run: ARun) -> None:
    """A batch in the middle that was completed with one group, and says so everywhere."""
    run.find("group_ended", group_id="g8").update(end="cancelled", reason="lost")
    run.find("step_completed", step=4).update(num_groups=1)
    run.line(5).update(groups_trained=1, staleness_max=0)


def _too_many_groups(run: ARun) -> None:
    for group in ("g14", "g15"):  # not chosen for an audit
        end = {**run.find("group_ended", group_id="g10"), "group_id": group}
        run.insert_before(run.find("step_completed", step=5), **end)
    run.find("step_completed", step=5).update(num_groups=3)
    run.line(6).update(groups_trained=3)


def _trained_again(run: ARun) -> None:
    """g8 is given back out of nothing, and trained a second time."""
    last = run.find("group_ended", group_id="g10")
    run.insert_before(last, "group_returned", group_id="g8", incarnation=2, reason="", to="queue")
    run.find("group_ended", group_id="g10").update(group_id="g8")


def _skipped_step(run: ARun) -> None:
    for group in ("g8", "g9"):
        run.find("group_ended", group_id=group).update(trained_at=5)
    run.find("group_ended", group_id="g8").update(min_version=3, max_version=3)
    run.remove("step_completed", step=4)
    run.find("step_completed", step=5).update(num_groups=2)
    run.remove("group_ended", group_id="g10")
    run.metrics.remove(run.line(5))
    run.line(6).update(groups_trained=2, staleness_max=2)


def _never_returned(run: ARun) -> None:
    run.remove("group_returned", group_id="g7")
    run.find("group_ended", group_id="g7", incarnation=2).update(group_id="g70")


def _stale_fence(run: ARun) -> None:
    """The first learner wakes up and publishes once more."""
    line = {**run.find("version_published", incarnation=1, step=3), "step": 4}
    run.insert_before(run.find("step_completed", incarnation=2, step=4), **line)


def _dead_version(run: ARun) -> None:
    """g7 is trained by the second learner with what 1.3 had sampled, after the checkpoint."""
    run.find("group_ended", group_id="g7", incarnation=2).update(
        min_incarnation=1, max_incarnation=1
    )


def _close_versions(run: ARun) -> None:
    run.config = run.config.replace("period = 1", "period = 2")
    run.find("run_started").update(period=2)


def _quarantine_before(place: str, evidence: list[Fields] | None = None) -> Plant:
    """w1 is quarantined before the end of group `place`, or before the event of that name."""

    def plant(run: ARun) -> None:
        before = run.find("run_finished")
        if place != "run_finished":
            before = run.find("group_ended", group_id=place)
        told = {"worker": "w1", "cause": "rewards", "reason": "wrong", "step": 5}
        nothing = dict.fromkeys(("centre", "spread", "bound", "trained_since"))
        run.insert_before(
            before,
            "worker_quarantined",
            **told,
            **nothing,
            evidence=[{"group_id": "g8"}] if evidence is None else evidence,
            precision="float32",
            in_training=[],
            num_trained=8,
            trained=[],
            withdrawn=[],
        )

    return plant


def _standby(run: ARun) -> None:
    end = run.find("lease_revoked", group_id="g11")
    run.insert_before(end, "worker_released", worker="w1", reason="surplus")
    run.insert_before(
        end,
        "lease_granted",
        **{"group_id": "g11", "lease": "l11", "worker": "w1", "attempt": 1},
        **{"incarnation": 2, "step": 4, "revoke_after_s": 9.0},
    )


VIOLATIONS: list[tuple[str, set[str], Plant]] = [
    ("a torn event at the end", {"records_whole"}, _torn("events")),
    ("a torn line of metrics at the end", {"records_whole"}, _torn("metrics")),
    ("a line that is no object", {"records_whole"}, _line_in_the_middle),
    (
        "an event without a field",
        {"records_whole"},
        lambda run: run.find("worker_ready").pop("worker"),
    ),
    (
        "a field of another type",
        {"records_whole"},
        _event("checkpoint_saved", {"step": 4}, kept=4),
    ),
    ("no run_started", {"run_started"}, _start_missing),
    ("another run in the folder", {"run_started"}, _second_run_id),
    ("another S than configured", {"run_started"}, _event("run_started", {}, staleness_max=3)),
    ("a setting without a value", {"run_started"}, _config("attempts_max = 3", "")),
    ("a second end", {"one_end"}, _repeat("group_ended", group_id="g11")),
    ("an end of an unknown kind", {"one_end"}, _end("g11", end="lost")),
    (
        "a return of a group that did not end",
        {"one_end"},
        lambda run: run.insert_before(
            run.find("learner_left"),
            "group_returned",
            group_id="g11",
            incarnation=1,
            reason="",
            to="queue",
        ),
    ),
    ("a group that never ended", {"all_ended"}, _drop("group_ended", group_id="g11")),
    (
        "a returned group that never ended again",
        {"all_ended"},
        _before_end("group_returned", group_id="g11", incarnation=2, reason="", to="queue"),
    ),
    ("a failure without a reason", {"reasons"}, _end("g90", reason=" ")),
    ("a lease of one that stands by", {"activation"}, _standby),
    ("an expiry while late groups are waited for", {"no_expiry_when_waiting"}, _expired),
    ("too many attempts", {"attempts"}, _end("g8", attempts=5)),
    (
        "a token beyond S",
        {"staleness", "metrics_agree"},
        _end("g8", min_version=1, min_incarnation=1),
    ),
    ("a version above the step", {"staleness", "versions_known"}, _end("g10", max_version=7)),
    (
        "a group trained without its versions",
        {"staleness"},
        _end("g9", min_version=None, max_version=None),
    ),
    (
        "a version that was never published",
        {"versions_known", "installed_digests"},
        _drop("version_published", incarnation=2, step=4),
    ),
    ("a version that its worker never installed", {"versions_known"}, _end("g9", worker="w3")),
    ("a version of a dead line", {"lineage"}, _dead_version),
    ("a group that a rewind forgot", {"rewinds"}, _never_returned),
    (
        "a resume beyond what was completed",
        {"rewinds", "trained_once", "steps_contiguous", "metrics_lines"},
        _event("learner_joined", {"incarnation": 2}, resume_step=5),
    ),
    ("a group trained twice", {"rewinds", "trained_once"}, _trained_again),
    ("a fenced learner that publishes", {"fencing"}, _stale_fence),
    (
        "a step that is missing",
        {"steps_contiguous", "metrics_lines", "period"},
        _skipped_step,
    ),
    ("a step completed twice", {"steps_contiguous"}, _repeat("step_completed", step=5)),
    (
        "a batch with fewer groups than were completed",
        {"batch_sizes"},
        _end("g9", end="cancelled", reason="lost"),
    ),
    ("a partial batch in the middle", {"batch_sizes"}, _fewer_groups),
    ("a batch above R", {"batch_sizes"}, _too_many_groups),
    (
        "groups trained at a step that was never completed",
        {"batch_sizes", "steps_contiguous", "metrics_lines", "period"},
        _drop("step_completed", step=4),
    ),
    ("versions closer than the period", {"period"}, _close_versions),
    (
        "a version of a step that is not completed",
        {"period", "installed_digests"},
        _event("version_published", {"step": 6}, step=9),
    ),
    ("a line of metrics that is missing", {"metrics_lines"}, _drop_metric(5)),
    ("a line that names another version", {"metrics_lines"}, _metric(5, policy_version=3)),
    ("another number of groups in the metrics", {"metrics_agree"}, _metric(5, groups_trained=1)),
    ("another staleness in the metrics", {"metrics_agree"}, _metric(5, staleness_max=1)),
    ("another reward in the metrics", {"metrics_agree"}, _metric(5, reward_mean=0.6)),
    ("a share above 1", {"records_whole", "metrics_lines"}, _metric(5, bubble_ratio=1.5)),
    ("a field of the metrics missing", {"records_whole", "metrics_lines"}, _without("entropy")),
    ("logprobs that differ", {"logprobs"}, _metric(4, logprob_diff_mean=2e-3)),
    ("too few logprob checks", {"logprobs"}, _metric(4, logprob_diff_mean=None)),
    ("too few tokens compared", {"logprobs"}, _metric(4, logprob_diff_tokens=900)),
    ("another eval reward", {"evals"}, _metric(6, eval_reward=0.8)),
    (
        "an install of other bytes",
        {"installed_digests"},
        _event("version_installed", {"worker": "w2", "step": 3}, manifest_digest="0" * 64),
    ),
    (
        "a version published twice",
        {"installed_digests", "period"},
        lambda run: run.insert_before(
            run.find("step_completed", step=5),
            **{**run.find("version_published", step=5), "manifest_digest": "0" * 64},
        ),
    ),
    (
        "a canary beyond the precision",
        {"canary"},
        _event("version_installed", {"worker": "w2", "step": 3}, canary_diff=1e-3),
    ),
    ("the newest version not stored", {"version_files"}, lambda run: run.versions.pop((2, 6))),
    (
        "a checkpoint ahead of v",
        {"checkpoints"},
        _event("checkpoint_saved", {"step": 4}, step=5, kept=[2, 5]),
    ),
    (
        "a checkpoint on the disk ahead of v",
        {"checkpoints"},
        lambda run: run.checkpoints.append((7, 2)),
    ),
    (
        "the newest checkpoint missing",
        {"checkpoints"},
        lambda run: run.checkpoints.remove((6, 2)),
    ),
    ("no checkpoint at all", {"checkpoints"}, lambda run: run.checkpoints.clear()),
    ("a chosen group without a verdict", {"audited"}, _drop("group_audited", group_id="g8")),
    (
        "a refuted group that is trained",
        {"audited"},
        _event("group_audited", {"group_id": "g8"}, verdict="refuted", reason="wrong"),
    ),
    (
        "a chosen group that another worker sampled anew",
        {"audited"},
        lambda run: run.insert_before(
            run.find("group_ended", group_id="g8"),
            "lease_granted",
            **{"group_id": "g8", "lease": "l99", "worker": "w1", "attempt": 2},
            **{"incarnation": 2, "step": 2, "revoke_after_s": 9.0},
        ),
    ),
    (
        "a verdict of its own sampler",
        {"true_verdicts"},
        _event("group_audited", {"group_id": "g8"}, worker="w2"),
    ),
    (
        "a verdict of nobody that was named",
        {"true_verdicts"},
        _event("group_audited", {"group_id": "g8"}, auditor="w1", worker="w2"),
    ),
    (
        "a confirmed difference",
        {"true_verdicts"},
        _event("group_audited", {"group_id": "g8"}, reward_diff_max=0.5),
    ),
    (
        "no audit without a reason",
        {"true_verdicts"},
        _event("group_audited", {"group_id": "g8"}, verdict="unaudited", auditor=None),
    ),
    ("a quarantined worker whose groups are trained", {"kept_out"}, _quarantine_before("g10")),
    ("a quarantine without evidence", {"kept_out"}, _quarantine_before("run_finished", [])),
]


@pytest.mark.parametrize(
    ("names", "plant"),
    [pytest.param(names, plant, id=title) for title, names, plant in VIOLATIONS],
)
def test_a_planted_violation_is_found_by_name(
    run: ARun, tmp_path: Path, names: set[str], plant: Plant
) -> None:
    plant(run)
    report = verify_run(run.write(tmp_path / "run"))
    assert {p.name for p in report.promises if not p.holds} == names, report.to_text()
    assert not report.ok
