"""Text to token ids and back, as the run's model does it: `tokenizers` and a chat template.

Loaded from the run's assets (tokenizer.json, tokenizer_config.json, generation_config.json,
config.json, chat_template.jinja). Neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo2.errors import ConfigError
from echo2_workers.endpoint.chat_template import ChatTemplate, Message, Tools
from echo2_workers.endpoint.errors import ApiError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token")
ANSWER: Final = "\u27e6echo2:answer\u27e7"
"""Stands for an assistant's content while the text after it is looked for."""


class ChatTokenizer:
    """`eos_ids` end a turn when the policy samples one of them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        eos_ids: Iterable[int],
        unknown_id: int | None = None,
    ) -> None:
        self.template = template
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._unknown_id = unknown_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Special tokens that stand in the text become their ids. Raises ApiError when a
        part of the text has no token: the policy would not see it."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:  # half a surrogate pair, as JSON may hold
            raise ApiError(f"the text is not valid Unicode: {error}") from error
        ids: list[int] = found.ids
        if self._unknown_id is not None and self._unknown_id in ids:
            start, end = found.offsets[ids.index(self._unknown_id)]
            name = self._tokenizer.id_to_token(self._unknown_id)
            if text[start:end] != name:
                raise ApiError(
                    f"the model's tokenizer has no token for {text[start:end][:50]!r} (it would "
                    f"become {name}); use what is in its vocabulary"
                )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens and without the token that ends a turn."""
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_ids:
            ids.pop()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Of one token, a special one by its name."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def render(
        self, messages: Sequence[Message], tools: Tools, arguments: Mapping[str, Any]
    ) -> str:
        """The prompt of a conversation: all messages, then the beginning of an answer."""
        return self.template.render(
            messages, tools=tools, generation_prompt=True, arguments=arguments
        )

    def render_after(
        self,
        messages: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any],
    ) -> str | None:
        """What the template puts after the assistant's `answer` to `messages` when `new`
        messages follow: the end of its turn, they, and the beginning of the next answer.

        None when that cannot be told: the template renders the answer in another way once
        more follows. The answer's own text does not matter, since its tokens are known: it
        is replaced by a mark, and the text after the mark is what counts.
        """
        marked = {**answer, "content": ANSWER}
        plain = {"role": "assistant", "content": ANSWER}

        def after(shown: Sequence[Message], *, generation_prompt: bool) -> str | None:
            text = self.template.render(
                shown, tools=tools, generation_prompt=generation_prompt, arguments=arguments
            )
            return text.partition(ANSWER)[2] if text.count(ANSWER) == 1 else None

        own = after([*messages, marked], generation_prompt=False)
        closing = after([*messages, plain], generation_prompt=False)
        whole = after([*messages, marked, *new], generation_prompt=True)
        if own is None or closing is None or whole is None:
            return None
        if not whole.startswith(own) or not own.endswith(closing):
            return None
        return closing + whole.removeprefix(own)


def load_chat_tokenizer(assets: Path | None) -> ChatTokenizer:
    """From the folder of a run's assets, or of a model. Raises ConfigError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            'tokenizers is not installed, and agents that speak text need it: pip install "'
            'echo2[openai]"'
        ) from error
    if assets is None:
        raise ConfigError(
            "there is no tokenizer: the run has no assets; its learner must publish the model's "
            "tokenizer.json beside the weights"
        )
    path = assets / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{assets} holds no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    config = _json(assets / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
    unknown = special.get("unk_token") or getattr(tokenizer.model, "unk_token", None)
    return ChatTokenizer(
        tokenizer,
        ChatTemplate(_template_sources(assets, config), {"bos_token": "", **special}),
        eos_ids=_eos_ids(assets, tokenizer, special),
        unknown_id=tokenizer.token_to_id(unknown) if isinstance(unknown, str) else None,
    )


def _template_sources(assets: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = assets / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    return {}


def _eos_ids(assets: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> set[int]:
    """What ends a sequence in the engine (generation_config.json before config.json), and the
    tokenizer's own end of a turn."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _json(assets / name).get("eos_token_id")
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
            break
    own = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return found | ({own} if own is not None else set())


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(entry: Any) -> str:
    """A special token as text, or as the object that some files hold."""
    return str(entry["content"]) if isinstance(entry, dict) else (entry or "")
