"""docs/reliability.md is true where a test can see it: tests exist, deadlines are the defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from echo2.config import Config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
TEXT = PAGE.read_text(encoding="utf-8")
_ISSUE = re.compile(r"^\| (?P<name>[\w.-]+/[\w.-]+#\d+) \|(?P<rest>.*)\|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/.]+\.py)::(\w+)`")
_DEADLINE = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)` \((\d+(?:\.\d+)?) s\)")
NOT_COVERED = "not covered yet"


def issues() -> dict[str, str]:
    found = [(match["name"], match["rest"]) for match in _ISSUE.finditer(TEXT)]
    assert len(dict(found)) == len(found), "an issue is there twice"
    return dict(found)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("name", issues())
def test_every_issue_has_words_of_ours_and_tests_or_says_that_it_has_none(name: str) -> None:
    *words, covered = (cell.strip() for cell in issues()[name].split(" | "))
    assert len(words) == 2
    assert all(len(cell) > 20 or cell == "the same" for cell in words)
    assert covered == NOT_COVERED or _TEST.findall(covered)


def test_the_table_holds_all_kinds() -> None:
    assert len(issues()) >= 40


@pytest.mark.parametrize(("path", "name"), sorted(set(_TEST.findall(TEXT))))
def test_every_test_that_is_named_exists(path: str, name: str) -> None:
    assert name in functions_of(ROOT / path)


@pytest.mark.parametrize(("key", "seconds"), sorted(set(_DEADLINE.findall(TEXT))))
def test_every_deadline_is_the_default_of_its_setting(key: str, seconds: str) -> None:
    value: object = Config()
    for part in key.split("."):
        value = getattr(value, part)
    assert value == float(seconds)


def test_the_table_of_waits_names_settings() -> None:
    assert len(set(_DEADLINE.findall(TEXT))) >= 15
