"""A byte tokenizer with a chat template that speaks of tools, and policies with words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo2.types import Sampling, Span, Version
from echo2_workers.endpoint import ChatTokenizer, load_chat_tokenizer
from echo2_workers.environment import Completion

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {#- as templates of models that think do: only the last answer shows its thoughts #}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def chat_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The assets of a model with a byte vocabulary, ChatML and tools."""
    folder = tmp_path_factory.mktemp("chat")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_assets: Path) -> ChatTokenizer:
    return load_chat_tokenizer(chat_assets)


class Policy:
    """Says the given texts in turn, and keeps what it was asked."""

    def __init__(self, tokenizer: ChatTokenizer, said: Sequence[str | Exception]) -> None:
        self.sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=1000)
        self.asked: list[list[int]] = []
        self.samplings: list[Sampling | None] = []
        self._tokenizer = tokenizer
        self._said = list(said)

    async def __call__(
        self, token_ids: Sequence[int], sampling: Sampling | None = None
    ) -> Completion:
        self.asked.append(list(token_ids))
        self.samplings.append(sampling)
        said = self._said.pop(0)
        if isinstance(said, Exception):
            raise said
        turn = len(self.asked)
        ids = tuple(self._tokenizer.encode(said))
        ends = ids[-1] in self._tokenizer.eos_ids
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 64 - turn
        spans = (Span(Version(1, turn), 0, len(ids)),)
        return Completion(ids, logprobs, spans, "stop" if ends else "length")

    def prompt(self, call: int) -> str:
        """What it was shown, with special tokens."""
        return "".join(self._tokenizer.token_text(i) for i in self.asked[call])


@pytest.fixture
def says(chat_tokenizer: ChatTokenizer) -> Callable[..., Policy]:
    """A policy that says these texts; each ends its turn unless it is told otherwise."""

    def make(*said: str | Exception, ends: bool = True) -> Policy:
        end = "<|im_end|>" if ends else ""
        texts = [text + end if isinstance(text, str) else text for text in said]
        return Policy(chat_tokenizer, texts)

    return make


@pytest.fixture(scope="session")
def a_tool() -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
