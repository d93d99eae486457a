"""The command line, called in the process of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from echo2 import cli


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Echo2 = Callable[..., Answer]


@pytest.fixture
def echo2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Echo2:
    """Calls the command line in this process."""

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["echo2", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        else:
            code = 0
        captured = capsys.readouterr()
        return Answer(int(code), captured.out, captured.err)

    return call
