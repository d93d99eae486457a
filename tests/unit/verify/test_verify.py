"""What `echo2 verify` allows, what it finds in files, and how it reports."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from echo2.errors import ConfigError
from echo2.verify import Report, verify_run

ARun = Any
"""The healthy run of conftest.py."""


def verify(run: ARun, tmp_path: Path) -> Report:
    return verify_run(run.write(tmp_path / "run"))


def broken(report: Report) -> set[str]:
    return {promise.name for promise in report.promises if not promise.holds}


def test_a_healthy_run_with_a_rewind_keeps_every_promise(run: ARun, tmp_path: Path) -> None:
    report = verify(run, tmp_path)
    assert broken(report) == set(), report.to_text()
    assert report.ok
    assert report["staleness"].facts["max"] == 2


def test_a_run_too_small_for_a_comparison_of_logprobs_says_that_nothing_was_checked(
    run: ARun, tmp_path: Path
) -> None:
    for line in run.metrics:
        line.update(tokens=50, logprob_diff_mean=None, logprob_diff_tokens=0)
    report = verify(run, tmp_path)
    assert report.ok, report.to_text()
    assert report["logprobs"].verdict == "skipped"
    assert "nothing was checked" in report["logprobs"].skipped


def test_comparisons_of_two_small_batches_may_be_added_up(run: ARun, tmp_path: Path) -> None:
    first, second = [line for line in run.metrics if line["logprob_diff_tokens"]][:2]
    first.update(logprob_diff_mean=None, logprob_diff_tokens=0)
    assert "logprobs" in broken(verify(run, tmp_path / "lost"))
    second.update(logprob_diff_tokens=2050)
    report = verify(run, tmp_path / "added")
    assert report["logprobs"].holds, report.to_text()


def test_an_interrupted_run_may_end_in_the_middle_of_a_line_and_of_a_group(
    run: ARun, tmp_path: Path
) -> None:
    run.interrupt()
    run.remove("group_ended", group_id="g11")
    run.last_bytes = {"events": b'{"time": 12', "metrics": b'{"st'}
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
    run.find("group_ended", group_id="g11").update(end="expired")
    run.config = run.config.replace('late = "wait"', f'late = "{late}"')
    run.find("run_started").update(late=late)
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


def test_a_workers_copies_are_checked_and_may_be_unfinished(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    store = folder / "workers" / "w1" / "store"
    copytree(folder / "versions", store)
    first, second = sorted(store.glob("*.bin"))[:2]
    first.rename(first.with_suffix(".partial"))
    report = verify_run(folder)
    assert broken(report) == set(), report.to_text()
    assert report["version_files"].facts["copies at workers"] == 8
    assert report["version_files"].facts["unfinished copies"] == 1
    second.write_bytes(second.read_bytes()[:-1])
    assert broken(verify_run(folder)) == {"version_files"}


def test_a_published_version_without_its_bytes_is_found(run: ARun, tmp_path: Path) -> None:
    folder = run.write(tmp_path / "run")
    sorted((folder / "versions").glob("*.bin"))[0].unlink()
    assert broken(verify_run(folder)) == {"version_files"}


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
    run.line(5).update(staleness_max=7)
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
