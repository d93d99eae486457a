"""The protocol page is generated from the messages; these tests keep it so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from echo2 import messages, protocol_docs
from echo2.core.group import TRANSITIONS, GroupState

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_is_what_the_messages_say_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == protocol_docs.render(), (
        "docs/protocol.md is out of date; run: python -m echo2.protocol_docs"
    )


@pytest.mark.parametrize("name", sorted(messages.MESSAGES))
def test_every_message_has_a_section_with_its_roles_lane_and_fields(name: str) -> None:
    cls = messages.MESSAGES[name]
    section = _section(name)
    for role in cls.SENDERS | cls.RECEIVERS:
        assert role.value in section
    assert f"lane {cls.LANE.value}" in section
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        assert f"| `{field.name}` |" in section
    for field_name, max_bytes in messages.frame_fields(cls):
        assert f"| `{field_name}` | frame of bytes | at most {max_bytes:,} bytes |" in section


def test_bounds_of_fields_are_printed_in_words() -> None:
    assert "| `engine` | [Name](#types) |  |  |" in _section("WorkerHello")
    assert "| `attempt` | integer | ≥ 1, ≤ 1,000 |  |" in _section("LeaseGranted")
    assert '| `kind` | "train" or "eval" |  |  |' in _section("LeaseGranted")
    assert "| `reward_mean` | [Real](#types) or null |  |  |" in _section("EvalResult")
    assert "at most 4,096 items" in _section("WorkerHello")


def test_check_fails_on_a_page_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "protocol.md"
    assert protocol_docs.main([str(page), "--check"]) == 1
    assert protocol_docs.main([str(page)]) == 0
    assert protocol_docs.main([str(page), "--check"]) == 0
    page.write_text(page.read_text(encoding="utf-8") + "\nedited by hand\n", encoding="utf-8")
    assert protocol_docs.main([str(page), "--check"]) == 1
    assert "python -m echo2.protocol_docs" in capsys.readouterr().err


def test_a_missing_folder_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert protocol_docs.main([str(tmp_path / "nowhere" / "protocol.md")]) == 2
    assert "not a folder" in capsys.readouterr().err


def test_the_life_of_a_group_in_the_docs_is_that_of_its_table() -> None:
    page = (PAGE.parent / "architecture.md").read_text(encoding="utf-8")
    order = list(GroupState)
    for state, following in TRANSITIONS.items():
        names = ", ".join(other.value for other in sorted(following, key=order.index))
        assert f"| {state.value} | {names} |" in page


def _section(name: str) -> str:
    page = PAGE.read_text(encoding="utf-8")
    return page.split(f"### {name}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
