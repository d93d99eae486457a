"""Words for those who mistyped one: what they may have meant, and what there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def alternatives(values: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)
