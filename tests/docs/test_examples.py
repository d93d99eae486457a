"""The examples of README and docs are true.

Every ```toml block is a valid (part of a) configuration. A ```python block marked
"runnable" runs in an empty folder with the shipped configurations beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo2.config import config_from_mapping

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    words: tuple[str, ...]
    body: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, tuple(match["info"].split()), match["body"]))
    return found


TOML = [block for block in blocks() if block.words[:1] == ("toml",)]
PYTHON = [b for b in blocks() if b.words[:1] == ("python",) and "runnable" in b.words]


@pytest.mark.parametrize("block", TOML, ids=str)
def test_a_toml_example_is_a_valid_configuration(block: Block) -> None:
    config_from_mapping(tomllib.loads(block.body), source=str(block))


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_example_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    script = tmp_path / "example.py"
    script.write_text(block.body, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, f"{block}:\n{ran.stdout}{ran.stderr}"


def test_the_pages_exist_and_hold_examples() -> None:
    assert all(page.read_text(encoding="utf-8").strip() for page in PAGES)
    assert TOML
    assert PYTHON


def test_no_page_names_a_link_that_leads_nowhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
