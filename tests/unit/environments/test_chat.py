"""Text in and out of tokens, with and without a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from echo2.errors import ConfigError
from echo2.types import Span, Version
from echo2_workers.environment import Completion
from echo2_workers.environments.chat import Chat

BOS, EOS = 1, 2
TEMPLATE = """\
{% for message in messages %}\
[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}\
{% if add_generation_prompt %}[assistant]{{ ' (short)' if short else '' }} {% endif %}"""
EDITING = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}>{% endif %}"


def said(chat: Chat, text: str, *, ended: bool) -> Completion:
    ids = (*chat.encode(text), *([EOS] if ended else []))
    spans = (Span(Version(1, 1), 0, len(ids)),)
    return Completion(ids, np.zeros(len(ids), np.float32), spans, "stop" if ended else "length")


@pytest.fixture
def templated(assets: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(assets, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_plain_text_begins_with_bos_and_goes_on_in_lines(assets: Path) -> None:
    chat = Chat(assets, system="Rules")
    assert chat.opening("go") == [BOS, *chat.encode("Rules\ngo")]
    assert chat.observation("more", said(chat, "x", ended=True)) == chat.encode("\nmore")
    assert chat.decode([BOS, *chat.encode("a b"), EOS]) == "a b"
    assert not chat.has_template
    assert Chat(assets, system=None, rules="Rules").opening("go") == [BOS, *chat.encode("go")]


def test_a_template_makes_turns_and_what_was_said_stays_as_it_was(templated: Path) -> None:
    chat = Chat(templated, system=None, rules="Rules", options={"short": True})
    assert chat.opening("go") == chat.encode(
        "[system] Rules<eos>\n[user] go<eos>\n[assistant] (short) "
    )
    rest = chat.encode("\n[user] more<eos>\n[assistant] (short) ")
    # A policy that sampled the end of its turn is not told it again; one that was cut is.
    assert chat.observation("more", said(chat, "x", ended=True)) == rest
    assert chat.observation("more", said(chat, "x", ended=False)) == [EOS, *rest]
    whole = chat.encode("[user] go<eos>\n[assistant] x<eos>\n[user] more<eos>\n[assistant] ")
    bare = Chat(templated)
    x = said(bare, "x", ended=True)
    assert [*bare.opening("go"), *x.token_ids, *bare.observation("more", x)] == whole


def test_a_template_can_be_left_aside_and_is_missed_where_it_is_asked_for(
    templated: Path, assets: Path
) -> None:
    assert Chat(templated, chat=False).opening("go") == [BOS, *Chat(assets).encode("go")]
    with pytest.raises(ConfigError, match="has no chat template"):
        Chat(assets, chat=True)


def test_a_template_that_rewrites_the_past_is_refused_at_the_second_turn(templated: Path) -> None:
    (templated / "chat_template.jinja").unlink()
    settings = json.loads((templated / "tokenizer_config.json").read_text())
    settings["chat_template"] = EDITING
    (templated / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = Chat(templated)
    assert chat.opening("go") == chat.encode("go>")
    with pytest.raises(ConfigError, match="chat = false"):
        chat.observation("more", said(chat, "x", ended=True))


def test_without_a_tokenizer_it_says_how_to_get_one(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            Chat(folder)
