"""What a dead engine process tells of its end."""

from __future__ import annotations

import signal

import pytest

from echo2_workers.engine_process import death_text


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (1, "ended with code 1"),
        (-signal.SIGKILL, "killed by SIGKILL: out of memory?"),
        (-signal.SIGSEGV, "killed by SIGSEGV: its log"),
        (-signal.SIGTERM, "killed by SIGTERM"),
    ],
)
def test_a_return_code_tells_the_cause(code: int, told: str) -> None:
    assert told in death_text(code)
