"""docs/errors.md: its rows, each (what is wrong, by whom it is told, the text)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
_CODE = re.compile(r"(?P<ticks>`+)(?P<text>.+?)(?P=ticks)")
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Row:
    line: int
    wrong: str
    by: str
    text: str


def rows() -> list[Row]:
    found = []
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("| ") or line.startswith(("| ---", "| wrong |")):
            continue
        wrong, by, text = (cell.strip() for cell in _CELL.split(line)[1:-1])
        if wrong:
            found.append(Row(number, wrong, by, text_of(text)))
    return found


def text_of(cell: str) -> str:
    """The lines of a message, each a span of code, with <br> between them."""
    lines = []
    for span in cell.split("<br>"):
        match = _CODE.fullmatch(span.strip())
        assert match, f"{span} is no code"
        text = match["text"]
        if len(match["ticks"]) > 1:  # a space beside a tick within
            text = text.removeprefix(" ").removesuffix(" ")
        lines.append(text.replace("\\|", "|"))
    return "\n".join(lines)


def cell_of(text: str) -> str:
    """The inverse of `text_of`."""
    spans = []
    for line in text.splitlines():
        escaped = line.replace("|", "\\|")
        spans.append(f"`` {escaped} ``" if "`" in escaped else f"`{escaped}`")
    return "<br>".join(spans)
