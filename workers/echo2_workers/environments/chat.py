"""A dialogue with the policy in text, for environments: prompt, turns, observations.

Promise: what the policy saw and said is never encoded twice. A dialogue starts as the ids of
`opening`, and each further turn only appends the ids of `observation`; sampled ids stay as
they were sampled.

Tokens are those of the run's own tokenizer, and turns those of its chat template
(`echo2_workers.endpoint`). Without a template, or with `chat = false`, a dialogue is plain
text: system text, prompt, and whatever follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2.errors import ConfigError
from echo2_workers.endpoint import load_chat_tokenizer
from echo2_workers.environment import Completion


class Chat:
    """How text becomes tokens. `chat` None: with the template where the run has one. `options`
    are handed to the template, such as {"enable_thinking": false}. `system` None: `rules`, where
    there is a template."""

    def __init__(
        self,
        assets: Path | None,
        *,
        chat: bool | None = None,
        system: str | None = "",
        options: Mapping[str, Any] | None = None,
        rules: str = "",
    ) -> None:
        self._tokenizer = load_chat_tokenizer(assets)
        template = self._tokenizer.template
        if chat and template.is_plain:
            raise ConfigError(
                "environment.settings: chat = true, and the model of the run has no chat template "
                "(chat_template.jinja, or chat_template in tokenizer_config.json); set chat = "
                "false for plain text, or use a model with one"
            )
        self.has_template = not template.is_plain and chat is not False
        self._system = system if system is not None else rules if self.has_template else ""
        self._options = dict(options or {})

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone; special tokens that are written out in it become ids."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids without special tokens."""
        return self._tokenizer.decode(token_ids)

    def opening(self, prompt: str) -> list[int]:
        """Ids up to where the policy speaks first."""
        if not self.has_template:
            text = f"{self._system}\n{prompt}" if self._system else prompt
            return self._tokenizer.encode(text, add_special_tokens=True)
        messages = [{"role": "user", "content": prompt}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        return self.encode(self._tokenizer.render(messages, (), self._options))

    def observation(self, text: str, completion: Completion) -> list[int]:
        """Ids between what the policy just said and where it speaks next: the end of its turn
        where it did not sample that itself, and `text` as the other side's turn. In plain
        text, where nothing marks a turn, `text` begins a new line."""
        if not self.has_template:
            return self.encode(f"\n{text}")
        between = self._tokenizer.render_after(
            [{"role": "user", "content": "."}],
            {"role": "assistant", "content": "."},
            [{"role": "user", "content": text}],
            (),
            self._options,
        )
        if between is None:
            raise ConfigError(
                "the model's chat template renders an answer in another way once more turns "
                "follow, so that no dialogue of several turns can be made with it; set chat = "
                "false in environment.settings"
            )
        ids = self.encode(between)
        said_the_end = completion.token_ids[-1:] == tuple(ids[:1])
        return ids[1:] if said_the_end else ids
