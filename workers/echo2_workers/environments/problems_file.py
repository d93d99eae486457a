"""A JSONL file of problems: one object a line, with the text asked and the answer wanted.

    {"prompt": "What is 12 + 7?", "answer": "19"}

The fields' names can be chosen; other fields are ignored; an answer may be text or a number.
Every line is checked when the file is read, and what is wrong is one ConfigError: each bad
line with its number, at most SHOWN_MAX of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo2.errors import ConfigError
from echo2.types import TASK_PAYLOAD_MAX_BYTES

SHOWN_MAX: Final = 5
LINE_BYTES_MAX: Final = TASK_PAYLOAD_MAX_BYTES // 2


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: str
    answer: str


def read_problems(path: Path, *, prompt_field: str, answer_field: str) -> list[Problem]:
    """All problems in the file's order. Raises ConfigError."""
    allowed = (
        f'each line must be a JSON object such as {{"{prompt_field}": "What is 12 + 7?", '
        f'"{answer_field}": "19"}}'
    )
    problems: list[Problem] = []
    bad: list[str] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    problems.append(_problem(line, prompt_field, answer_field))
                except ValueError as error:
                    bad.append(f"line {number} {error}")
    except OSError as error:
        raise ConfigError(
            f"environment.settings: path = {str(path)!r} cannot be read ({error.strerror}); the "
            "file is read by the learner, from the folder it was started in"
        ) from error
    if bad:
        more = f"; and {len(bad) - SHOWN_MAX} more" if len(bad) > SHOWN_MAX else ""
        raise ConfigError(f"{path}: {'; '.join(bad[:SHOWN_MAX])}{more}; {allowed}")
    if not problems:
        raise ConfigError(f"{path} holds no problem; {allowed}")
    return problems


def _problem(line: bytes, prompt_field: str, answer_field: str) -> Problem:
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"has {len(line)} bytes; at most {LINE_BYTES_MAX} are allowed")
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON in UTF-8 ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"is a {type(content).__name__}, no object")
    prompt, answer = content.get(prompt_field), content.get(answer_field)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'has no text in "{prompt_field}"')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f'has neither text nor a number in "{answer_field}"')
    if not str(answer).strip():
        raise ValueError(f'has an empty "{answer_field}"')
    return Problem(prompt, str(answer).strip())
