from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from echo2.logs import setup_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_has_one_event_a_line_with_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker.log"
    setup_logging("info", "json", path)
    structlog.get_logger().info("worker_joined", worker="w-1", slots=8)
    structlog.get_logger().debug("peer_admitted")
    (event,) = lines_of(path)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "worker_joined", "level": "info", "worker": "w-1", "slots": 8}


def test_an_error_carries_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "log"
    setup_logging("info", "json", path)
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        structlog.get_logger().error("task_crashed", exc_info=error)
        logging.getLogger("asyncio").exception("a library's own")
    ours, theirs = lines_of(path)
    assert "ZeroDivisionError: by zero" in ours["exception"]
    assert "ZeroDivisionError: by zero" in theirs["exception"]
    assert theirs["event"] == "a library's own"


def test_the_console_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", "console")
    structlog.get_logger().warning("peer_refused", reason="stranger")
    structlog.get_logger().info("worker_joined")
    logging.getLogger("library").info("chatter")
    text = capsys.readouterr().err
    assert "peer_refused" in text
    assert "reason=stranger" in text
    assert "\x1b" not in text
    assert len(text.splitlines()) == 1


def test_the_last_call_counts(tmp_path: Path) -> None:
    setup_logging("error", "json", tmp_path / "first")
    log = structlog.get_logger()
    log.error("step_failed")
    setup_logging("debug", "json", tmp_path / "second")
    log.debug("step_completed")
    assert [event["event"] for event in lines_of(tmp_path / "first")] == ["step_failed"]
    assert [event["event"] for event in lines_of(tmp_path / "second")] == ["step_completed"]
