"""docs/errors.md says what bad input is answered with: literally, and of all of it.

Each row of the page has a case here that really makes its bad input and compares what the
product says with the row. A message that changes, or a row without a case, fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import structlog
from bad_input import CASES, Bench
from page import Row, cell_of, rows

for path in sorted(Path(__file__).parent.glob("cases_*.py")):
    import_module(path.stem)  # registers its cases
ROWS = rows()


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Commands that run in this process set the logging up as their own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.wrong)
def test_bad_input_is_answered_as_the_page_says(row: Row, bench: Bench) -> None:
    if row.wrong not in CASES:
        pytest.fail(f"line {row.line} of docs/errors.md has no case: {row.wrong}")
    told = CASES[row.wrong](bench)
    said = f"| {row.wrong} | {told.by} | {cell_of(told.text)} |"
    assert (told.by, told.text) == (row.by, row.text), f"the row should read\n{said}"


def test_the_page_has_a_row_for_every_case_and_none_twice() -> None:
    on_the_page = Counter(row.wrong for row in ROWS)
    assert not CASES.keys() - on_the_page.keys(), "the page lacks these"
    assert not [wrong for wrong, times in on_the_page.items() if times > 1]
    assert len(ROWS) >= 40


def test_every_message_says_more_than_that_something_failed() -> None:
    """No traceback, no bare class name, no empty words; and none ends in the middle."""
    for row in ROWS:
        assert len(row.text.split()) >= 4, row.wrong
        assert "Traceback" not in row.text
        assert not row.text.endswith((":", ",", ";")), row.wrong
