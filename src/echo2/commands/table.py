"""Rows of text in columns, for people."""

from __future__ import annotations

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """One line each, the head first; every column as wide as its widest cell."""
    whole = [list(head), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*whole, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in whole
    ]
