"""Where the answer stands in what the policy said."""

from __future__ import annotations

import pytest

from echo2.errors import ConfigError
from echo2_workers.environments.answers import AnswerRule


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("whole", "  12 \n", "12"),
        ("whole", "", ""),
        ("last_line", "so\n\n 12 \n\n", "12"),
        ("last_line", "\n", None),
        ("last_number", "first 3, then 1,234.50 dollars.", "1234.50"),
        ("last_number", "it is -7", "-7"),
        ("last_number", "none", None),
        ("boxed", r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1", None),
        ("tags:answer", "<answer>1</answer> <answer> 2 </answer>", "2"),
        ("tags:answer", "<answer>1", None),
        ("tags:answer", "1</answer>", None),
        ("after:####", "#### 1\n#### 42 \nend", "42"),
        ("after:####", "42", None),
    ],
)
def test_each_rule_finds_the_last_answer_or_none(rule: str, text: str, answer: str | None) -> None:
    assert AnswerRule(rule).find(text) == answer


@pytest.mark.parametrize("rule", ["", "box", "whole:", "tags", "tags:", "after:", "boxed:x"])
def test_an_unknown_rule_says_which_there_are(rule: str) -> None:
    with pytest.raises(ConfigError, match="allowed are whole, last_line, last_number, boxed"):
        AnswerRule(rule)
