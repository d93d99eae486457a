"""Every promise that `echo2 verify` names is broken here once, and found by its name.

`a_run()` is a healthy run that did everything once: S = 2, κ = 1, R = 2, two workers. Its
first learner trained 0 to 3, checkpointed at 2 and was lost; the second resumed at 2, got
back the groups of steps 2 and 3, and trained 2 to 5, the last batch with one group. Tests
plant one violation into its records and ask for the broken promises by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from blake3 import blake3

from echo2.errors import ConfigError
from echo2.verify import Report, verify_run
from echo2.verify.schema import COUNT, METRICS
from echo2.weights.versions import write_version

CONFIG = """\
[model]
dtype = "float32"
[staleness]
max = 2
late = "wait"
period = 1
[dispatch]
group_size = 2
attempts_max = 3
[learner]
groups_per_step = 2
logprob_check_every_steps = 2
"""

Fields = dict[str, Any]


@dataclass
class ARun:
    """The records of a run: change them, then `write` them."""

    events: list[Fields] = field(default_factory=list)
    metrics: list[Fields] = field(default_factory=list)
    versions: dict[tuple[int, int], Path] = field(default_factory=dict)
    """Version -> its files, without their suffixes."""
    checkpoints: list[tuple[int, int]] = field(default_factory=lambda: [(4, 2), (6, 2)])
    """(step, incarnation) of those on the disk."""
    config: str = CONFIG
    last_bytes: dict[str, bytes] = field(default_factory=dict)
    """File name -> bytes after its last line."""

    def add(self, event: str, **fields: Any) -> Fields:
        made = {"time": 1000.0 + len(self.events), "event": event, **fields}
        self.events.append(made)
        return made

    def insert_before(self, place: Fields, event: str, **fields: Any) -> Fields:
        made = {"time": place["time"], "event": event, **fields}
        self.events.insert(self.events.index(place), made)
        return made

    def find(self, event: str, **fields: Any) -> Fields:
        """The last event of this name with these fields."""
        for line in reversed(self.events):
            if line["event"] == event and all(line.get(k) == v for k, v in fields.items()):
                return line
        raise LookupError(f"no {event} with {fields}")

    def remove(self, event: str, **fields: Any) -> None:
        self.events.remove(self.find(event, **fields))

    def line(self, step: int, incarnation: int = 2) -> Fields:
        """The line of metrics of a step."""
        return next(
            line
            for line in self.metrics
            if (line["step"], line["incarnation"]) == (step, incarnation)
        )

    def interrupt(self) -> None:
        """The run was killed: it has no last word."""
        self.remove("run_finished")

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.resolved.toml").write_text(self.config, encoding="utf-8")
        for name, lines in (("events", self.events), ("metrics", self.metrics)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            more = self.last_bytes.get(name, b"")
            (folder / f"{name}.jsonl").write_bytes(text.encode() + more)
        (folder / "versions").mkdir()
        for path in self.versions.values():
            for suffix in (".bin", ".manifest"):
                copyfile(f"{path}{suffix}", folder / "versions" / (path.name + suffix))
        for step, incarnation in self.checkpoints:
            _write_checkpoint(folder / "checkpoints" / f"step-{step:08d}-i{incarnation}", step)
        return folder


def _write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"abcd"
    (folder / "policy.safetensors").write_bytes(content)
    files = {"policy.safetensors": [len(content), blake3(content).hexdigest()]}
    state = {"format": 1, "state": {"step": step}, "files": files, "rng": {}}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


def a_run(folder: Path) -> ARun:
    """The healthy run; its versions are written to `folder`."""
    run = ARun()
    make = _Maker(run, folder)
    run.add(
        "run_started",
        run_id="r1",
        staleness_max=2,
        groups_per_step=2,
        group_size=2,
        late="wait",
        period=1,
    )
    for worker in ("w1", "w2"):
        run.add("worker_joined", worker=worker, engine="transformers", precision="float32", slots=4)
    run.add("learner_joined", incarnation=1, resume_step=0, digest="")
    make.publish(1, 0)
    run.add("worker_ready", worker="w1")
    run.add("lease_revoked", group_id="g0", lease="l0", worker="w2", reason="silent for 15 s")
    run.add("lease_failed", group_id="g1", lease="l1", worker="w2", stage="engine", reason="died")
    make.end("g90", "failed", reason="3 attempts, the last: the environment raised")
    make.batch(1, 0, g0=(1, 0), g1=(1, 0))
    make.publish(1, 1)
    make.batch(1, 1, g2=(1, 0), g3=(1, 1))
    make.publish(1, 2)
    run.add("checkpoint_saved", incarnation=1, step=2, kept=[2])
    make.batch(1, 2, g4=(1, 1), g5=(1, 2))
    make.publish(1, 3)
    make.batch(1, 3, g6=(1, 2), g7=(1, 3))
    run.add("learner_left", incarnation=1, reason="silent for 15 s")
    run.add("learner_joined", incarnation=2, resume_step=2, digest="")
    for group, place in (("g4", "buffer"), ("g5", "buffer"), ("g6", "queue"), ("g7", "queue")):
        run.add("group_returned", group_id=group, incarnation=2, reason="resumed at 2", to=place)
    make.publish(2, 2)
    make.batch(2, 2, g4=(1, 1), g5=(1, 2))
    make.publish(2, 3)
    make.batch(2, 3, g6=(2, 2), g7=(2, 3))
    run.add("checkpoint_saved", incarnation=2, step=4, kept=[2, 4])
    make.publish(2, 4)
    make.batch(2, 4, g8=(2, 2), g9=(2, 4))
    make.publish(2, 5)
    make.batch(2, 5, g10=(2, 5))
    make.publish(2, 6)
    run.add("checkpoint_saved", incarnation=2, step=6, kept=[4, 6])
    run.add(
        "eval_ended",
        eval_id="e6",
        incarnation=2,
        step=6,
        num_asked=4,
        num_done=4,
        reward_mean=0.75,
        reason="",
    )
    run.line(6).update(eval_version=6, eval_reward=0.75)
    run.add("lease_revoked", group_id="g11", lease="l11", worker="w1", reason="the run is over")
    make.end("g11", "cancelled", reason="the run is over")
    run.add("run_finished", reason="all 6 steps are done", finished=True)
    return run


class _Maker:
    def __init__(self, run: ARun, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.incarnation = 1

    def publish(self, incarnation: int, step: int) -> None:
        """Published, and installed by both workers."""
        self.incarnation = incarnation
        content = f"weights of {incarnation}.{step} ".encode() * 20
        manifest = write_version(
            self.folder, [("w", "U8", (len(content),), content)], chunk_bytes=64
        )
        self.run.versions[incarnation, step] = self.folder / manifest.manifest_digest
        version = {
            "incarnation": incarnation,
            "step": step,
            "manifest_digest": manifest.manifest_digest,
        }
        self.run.add("version_published", **version, num_bytes=len(content))
        for worker in ("w1", "w2"):
            self.run.add(
                "version_installed",
                worker=worker,
                **version,
                fetch_s=0.1,
                install_s=0.1,
                pause_s=0.0,
                canary_diff=2e-6,
            )

    def end(self, group: str, end: str, *, reason: str = "", **fields: Any) -> None:
        line = {
            "group_id": group,
            "end": end,
            "reason": reason,
            "worker": None,
            "incarnation": self.incarnation,
            "min_version": None,
            "max_version": None,
            "min_incarnation": None,
            "max_incarnation": None,
            "trained_at": None,
            "tokens": 0,
            "reward_mean": None,
            "attempts": 1,
        }
        self.run.add("group_ended", **{**line, **fields})

    def batch(self, incarnation: int, step: int, **groups: tuple[int, int]) -> None:
        """Groups by the version that sampled them, trained at `step`."""
        for group, (sampled_incarnation, sampled_step) in groups.items():
            self.end(
                group,
                "trained",
                worker="w1",
                incarnation=incarnation,
                min_version=sampled_step,
                max_version=sampled_step,
                min_incarnation=sampled_incarnation,
                max_incarnation=sampled_incarnation,
                trained_at=step,
                tokens=400,
                reward_mean=0.5,
            )
        self.run.add("step_completed", incarnation=incarnation, step=step, num_groups=len(groups))
        zeros = dict.fromkeys(METRICS, 0.0)
        counts = {name: 0 for name, kind in METRICS.items() if kind is COUNT}
        nulls = dict.fromkeys(("eval_reward", "eval_version"))
        line = {
            "step": step + 1,
            "incarnation": incarnation,
            "policy_version": step,
            "reward_mean": 0.5,
            "groups_trained": len(groups),
            "staleness_max": max(step - sampled for _, sampled in groups.values()),
            "logprob_diff_mean": 3e-7 if step % 2 else None,
            "logprob_diff_tokens": 1200 if step % 2 else 0,
        }
        self.run.metrics.append({**zeros, **counts, **nulls, **line})


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
    run.events.insert(5, ["not", "an", "object"])  # type: ignore[arg-type]


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
    for group in ("g12", "g13"):
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
    run.find("group_ended", group_id="g7", incarnation=2).update(group_id="g77")


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
]


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> ARun:
    return a_run(tmp_path_factory.mktemp("versions"))


@pytest.fixture
def run(healthy_run: ARun) -> ARun:
    return deepcopy(healthy_run)


def verify(run: ARun, tmp_path: Path) -> Report:
    return verify_run(run.write(tmp_path / "run"))


def broken(report: Report) -> set[str]:
    return {promise.name for promise in report.promises if not promise.holds}


def test_a_healthy_run_with_a_rewind_keeps_every_promise(run: ARun, tmp_path: Path) -> None:
    report = verify(run, tmp_path)
    assert broken(report) == set(), report.to_text()
    assert report.ok
    assert report["staleness"].facts["max"] == 2


@pytest.mark.parametrize(
    ("names", "plant"),
    [pytest.param(names, plant, id=title) for title, names, plant in VIOLATIONS],
)
def test_a_planted_violation_is_found_by_name(
    run: ARun, tmp_path: Path, names: set[str], plant: Plant
) -> None:
    plant(run)
    report = verify(run, tmp_path)
    assert broken(report) == names, report.to_text()
    assert not report.ok


def test_an_interrupted_run_may_end_in_the_middle_of_a_line_and_of_a_group(
    run: ARun, tmp_path: Path
) -> None:
    run.interrupt()
    run.remove("group_ended", group_id="g11")
    _torn("events")(run)
    _torn("metrics")(run)
    report = verify(run, tmp_path)
    assert broken(report) == set(), report.to_text()
    assert "1 groups were still under way" in report["all_ended"].notes[0]
    assert len(report["records_whole"].notes) == 2


def test_a_run_may_be_interrupted_between_any_two_events(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    metrics = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    written = 0
    for number, line in enumerate(lines[:-1], 1):
        event = json.loads(line)
        if event["event"] == "step_completed":
            written += 1
        if number % 3:
            continue
        (folder / "events.jsonl").write_bytes(b"".join(lines[:number]))
        (folder / "metrics.jsonl").write_bytes(b"".join(metrics[:written]))
        report = verify_run(folder)
        # The last eval and the checkpoints on the disk are of the whole run.
        assert broken(report) - {"evals", "checkpoints"} == set(), (
            f"cut after {number}\n{report.to_text()}"
        )


def test_a_line_torn_by_a_killed_learner_is_only_noted(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(4, b'{"step": 5, "incarn\n')
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    report = verify_run(folder)
    assert broken(report) == set(), report.to_text()
    assert "its writer died" in report["records_whole"].notes[0]


def test_a_torn_line_that_no_restart_explains_is_a_violation(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(6, b'{"step": 5, "incarn\n')
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    assert broken(verify_run(folder)) == {"records_whole"}


@pytest.mark.parametrize("late", ["drop", "mask"])
def test_groups_may_expire_where_the_settings_say_so(run: ARun, tmp_path: Path, late: str) -> None:
    _expired(run)
    _config('late = "wait"', f'late = "{late}"')(run)
    _event("run_started", {}, late=late)(run)
    report = verify(run, tmp_path)
    assert broken(report) == set(), report.to_text()
    assert report["no_expiry_when_waiting"].verdict == "skipped"


def test_the_run_of_a_learner_of_the_users_own_skips_what_is_about_metrics(
    run: ARun, tmp_path: Path
) -> None:
    run.checkpoints.clear()
    folder = run.write(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    report = verify_run(folder)
    assert broken(report) == set(), report.to_text()
    assert report["metrics_agree"].verdict == "skipped"
    assert report["checkpoints"].verdict == "skipped"


def test_lost_metrics_are_a_violation(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert broken(verify_run(folder)) == {"metrics_lines"}


def test_one_wrong_byte_in_a_stored_version_is_found(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    path = sorted((folder / "versions").glob("*.bin"))[0]
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    report = verify_run(folder)
    assert broken(report) == {"version_files"}
    assert "chunk 1 does not have the digest" in report["version_files"].violations[0].text


def test_a_manifest_under_another_name_is_found(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    path = sorted((folder / "versions").glob("*.manifest"))[0]
    path.write_bytes(path.read_bytes() + b"\0")
    assert broken(verify_run(folder)) == {"version_files"}


@pytest.mark.parametrize(("step", "names"), [(4, set()), (6, {"checkpoints"})])
def test_a_torn_checkpoint_matters_only_if_it_is_the_newest(
    run: ARun, tmp_path: Path, step: int, names: set[str]
) -> None:
    folder = run.write(tmp_path / "run")
    path = folder / "checkpoints" / f"step-{step:08d}-i2" / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    report = verify_run(folder)
    assert broken(report) == names, report.to_text()
    assert "do not have the digest" in report["checkpoints"].notes[0]


def test_the_report_is_a_table_and_plain_json(run: ARun, tmp_path: Path) -> None:
    _metric(5, staleness_max=7)(run)
    report = verify(run, tmp_path)
    text = report.to_text()
    assert "BROKEN   metrics_agree" in text
    assert "metrics.jsonl:7: staleness_max is 7 at step 5; at most 2 is allowed" in text
    found = json.loads(json.dumps(report.to_json()))
    assert found["ok"] is False
    promise = next(p for p in found["promises"] if p["name"] == "metrics_agree")
    assert promise["holds"] is False
    assert promise["violations"][0]["ids"] == {"step": 5, "incarnation": 2}


def test_a_folder_without_a_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        verify_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"holds no config\.resolved\.toml"):
        verify_run(tmp_path)


def test_nothing_of_the_core_is_used() -> None:
    package = Path(verify_run.__code__.co_filename).parent
    for path in package.glob("*.py"):
        assert "import echo2.core" not in path.read_text(encoding="utf-8")
        assert "from echo2.core" not in path.read_text(encoding="utf-8")
