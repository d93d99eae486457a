"""Where in the policy's text the answer stands.

| rule | the answer is |
|---|---|
| "whole" | all of the text |
| "last_line" | its last line that is not empty |
| "last_number" | the last number in it ("1,234.5" is read as 1234.5) |
| "boxed" | the inside of the last \\boxed{...}, braces matched |
| "tags:NAME" | what stands between the last <NAME> and </NAME> |
| "after:TEXT" | the rest of the line after the last TEXT, e.g. "after:####" |

Surrounding white space is removed. A text without the mark has no answer (None).
"""

from __future__ import annotations

import re
from typing import Final

from echo2.errors import ConfigError

RULES: Final = ("whole", "last_line", "last_number", "boxed", "tags:NAME", "after:TEXT")
_NUMBER: Final = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_BOXED: Final = "\\boxed{"


class AnswerRule:
    """Raises ConfigError for a rule that is none of these."""

    def __init__(self, rule: str) -> None:
        kind, _, argument = rule.partition(":") if isinstance(rule, str) else ("", "", "")
        known = kind in ("whole", "last_line", "last_number", "boxed") and rule == kind
        if not known and not (kind in ("tags", "after") and argument):
            raise ConfigError(
                f"environment.settings: answer = {rule!r}; allowed are "
                f'{", ".join(RULES)}, for example answer = "after:####"'
            )
        self._kind = kind
        self._argument = argument

    def find(self, text: str) -> str | None:
        """The answer in `text`, or None."""
        match self._kind:
            case "whole":
                return text.strip()
            case "last_line":
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                return lines[-1] if lines else None
            case "last_number":
                numbers = _NUMBER.findall(text)
                return numbers[-1].replace(",", "") if numbers else None
            case "boxed":
                return _last_boxed(text)
            case "tags":
                return _between(text, f"<{self._argument}>", f"</{self._argument}>")
            case _:
                _, found, rest = text.rpartition(self._argument)
                return rest.strip().partition("\n")[0].strip() if found else None


def _between(text: str, opening: str, closing: str) -> str | None:
    before, found, _ = text.rpartition(closing)
    if not found:
        return None
    _, found, inside = before.rpartition(opening)
    return inside.strip() if found else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    start += len(_BOXED)
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None
