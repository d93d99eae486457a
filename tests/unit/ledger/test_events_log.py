"""events.jsonl: whole lines, torn ends cut off, and what a new coordinator reads out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2.errors import ConfigError, Echo2Error
from echo2.ledger.events_log import EventsLog, read_events, restore
from echo2.types import Version


def a_log(path: Path, *events: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def ended(index: int, end: str = "trained", trained_at: int | None = None) -> dict[str, object]:
    return {"event": "group_ended", "group_id": f"g{index}", "end": end, "trained_at": trained_at}


def test_lines_are_appended_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventsLog(path)
    log.open()
    log.write("run_started", {"run_id": "r"})
    log.close()
    with path.open("ab") as file:
        file.write(b'{"event": "tor')
    assert [line["event"] for line in read_events(path)] == ["run_started"]
    log.open()
    log.write("run_finished", {})
    log.close()
    assert [line["event"] for line in read_events(path)] == ["run_started", "run_finished"]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 200_000)
    log = EventsLog(path)
    log.open()
    log.close()
    assert path.read_bytes() == b""


def test_a_line_that_is_not_json_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "run_started"}\nnonsense\n')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        list(read_events(path))


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        EventsLog(tmp_path / "missing" / "events.jsonl").open()


def test_there_is_nothing_to_restore_before_a_learner_joined(tmp_path: Path) -> None:
    assert restore(tmp_path / "events.jsonl") is None
    assert restore(a_log(tmp_path / "events.jsonl", {"event": "run_started"})) is None


def test_incarnations_ends_and_the_data_position_are_restored(tmp_path: Path) -> None:
    path = a_log(
        tmp_path / "events.jsonl",
        {"event": "run_started"},
        {"event": "learner_joined", "incarnation": 1, "resume_step": 0},
        {
            "event": "version_published",
            "incarnation": 1,
            "step": 0,
            "manifest_digest": "d",
        },
        ended(0, trained_at=0),
        {"event": "step_completed", "step": 0},
        {"event": "checkpoint_saved", "step": 1, "kept": [1]},
        ended(1, trained_at=1),
        ended(3, "failed"),
        {"event": "step_completed", "step": 1},
        ended(5, trained_at=2),
        {"event": "step_completed", "step": 2},
        {"event": "learner_joined", "incarnation": 2, "resume_step": 1},
        {"event": "group_returned", "group_id": "g5"},
        {"event": "group_returned", "group_id": "g1"},
        ended(1, trained_at=1),
        {"event": "step_completed", "step": 1},
    )
    restored = restore(path)
    assert restored is not None
    assert restored.incarnation == 2
    assert restored.step == 2
    assert restored.starts == ((1, 0), (2, 1))
    assert restored.next_index == 6
    assert restored.open_indexes == (2, 4, 5), "never ended, or returned"
    assert restored.trained == (("g1", 1),)
    assert restored.kept == (1,)
    assert restored.published == ((Version(1, 0), "d"),)
    assert restored.ends == {"trained": 2, "failed": 1}


def test_a_full_disk_is_told_in_one_sentence_and_the_log_still_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventsLog(tmp_path / "events.jsonl")
    log.open()
    log.write("run_started", {})
    log.flush()
    monkeypatch.setattr(log, "_file", open("/dev/full", "ab", buffering=0))  # noqa: SIM115 closed by the log
    log.write("run_finished", {})
    with pytest.raises(Echo2Error, match=r"cannot be written \(No space left on device\)"):
        log.flush()
    log.close()
