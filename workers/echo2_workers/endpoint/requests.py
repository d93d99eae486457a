"""What a client may ask, checked: what is served, and what is refused by name.

A field that would change what the policy samples and that no engine here can do (n, logit
bias, penalties, forced formats, images) is refused: ignoring it would train on something
else than the agent believes. Fields that do not touch the tokens (user, metadata, store,
seed, ...) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo2_workers.endpoint.chat_template import Message
from echo2_workers.endpoint.errors import ApiError

MESSAGES_MAX: Final = 4096
STOPS_MAX: Final = 16

_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(_Table):
    include_usage: bool | None = None


class _Part(_Table):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class _Function(_Table):
    name: _Name
    arguments: str = ""


class _Call(_Table):
    id: str = ""
    function: _Function


class _MessageIn(_Table):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Request(_Table):
    model: str = "policy"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=STOPS_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def tokens_max(self) -> int | None:
        return self.max_tokens


class ChatRequest(_Request):
    messages: Annotated[list[_MessageIn], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def tokens_max(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else list(self.tools or ())

    def turns(self) -> tuple[Turn, ...]:
        turns = tuple(_turn(message, index) for index, message in enumerate(self.messages))
        if turns[-1].role == "assistant":
            raise ApiError(
                "the last message is the assistant's; end with a user, tool or system message "
                "(an answer cannot be begun for the policy)",
                param="messages",
            )
        return turns


class TextRequest(_Request):
    prompt: str | list[_TokenId] | list[str]
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message in a normal form: two that mean the same are equal in `matter`."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as they came) of each tool call."""
    call_ids: tuple[str, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def matter(self) -> tuple[Any, ...]:
        """What must be equal for two messages to be the same. Ids of calls are not in it, nor
        white space around what the assistant said."""
        content = self.content.strip() if self.role == "assistant" else self.content
        return self.role, content, tuple((n, _normal(a)) for n, a in self.calls), self.name

    def message(self) -> Message:
        """As chat templates expect it: arguments of calls as objects, not as text."""
        message: Message = {"role": self.role, "content": self.content}
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": _parsed(arguments)},
                }
                for call_id, (name, arguments) in zip(self.call_ids, self.calls, strict=True)
            ]
        return message


def read_chat_request(body: Any) -> ChatRequest:
    """Raises ApiError, with the field at fault."""
    _refuse(body, _REFUSED | _REFUSED_IN_CHAT)
    return _validated(ChatRequest, body)


def read_text_request(body: Any) -> TextRequest:
    _refuse(body, _REFUSED | _REFUSED_IN_TEXT)
    request = _validated(TextRequest, body)
    if request.prompt and isinstance(request.prompt, list) and isinstance(request.prompt[0], str):
        if len(request.prompt) > 1:
            raise ApiError(
                f"{len(request.prompt)} prompts in one call; send one call for each",
                param="prompt",
                code="unsupported_value",
            )
        return request.model_copy(update={"prompt": request.prompt[0]})
    return request


_R = TypeVar("_R", bound=_Request)
_NOT: Final = (None, False)
_REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "n": ((None, 1), "each call is one turn of a trajectory; send one call for each sample"),
    "best_of": ((None, 1), "each call is one turn of a trajectory"),
    "frequency_penalty": ((None, 0), "it would change what the policy samples"),
    "presence_penalty": ((None, 0), "it would change what the policy samples"),
    "repetition_penalty": ((None, 1), "it would change what the policy samples"),
    "logit_bias": ((None, {}), "it would change what the policy samples"),
    "top_k": ((None, 0, -1), "only top_p cuts the distribution"),
    "min_p": ((None, 0), "only top_p cuts the distribution"),
}
"""Field -> (values that ask for nothing, why the others are refused)."""
_REFUSED_IN_CHAT: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "response_format": (
        (None, {"type": "text"}),
        "the policy cannot be forced into a format; ask for it in a message",
    ),
    "tool_choice": (
        (None, "auto", "none"),
        'the policy cannot be forced to call a tool; use "auto" or "none"',
    ),
    "top_logprobs": ((None, 0), "only the sampled token's logprob is known"),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "none", "auto"), "use tools"),
    "modalities": ((None, ["text"]), "only text is served"),
    "audio": (_NOT, "only text is served"),
    "web_search_options": (_NOT, "there is no search"),
}
_REFUSED_IN_TEXT: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "echo": (_NOT, "the prompt's logprobs are not computed"),
    "suffix": ((None, ""), "the policy only continues"),
    "logprobs": ((None, 0), "only the sampled token's logprob is known; use 0"),
}


def _refuse(body: Any, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object")
    for name, (harmless, why) in refused.items():
        value = body.get(name)
        if value not in harmless:
            raise ApiError(
                f"{name} = {json.dumps(value)[:100]} is not supported: {why}",
                param=name,
                code="unsupported_value",
            )


def _validated(kind: type[_R], body: dict[str, Any]) -> _R:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{where}: {first['msg']}", param=where or None) from None


def _turn(message: _MessageIn, index: int) -> Turn:
    calls = message.tool_calls or []
    return Turn(
        role="system" if message.role == "developer" else message.role,
        content=_text(message.content, index),
        calls=tuple((call.function.name, call.function.arguments) for call in calls),
        call_ids=tuple(call.id for call in calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _text(content: str | list[_Part] | None, index: int) -> str:
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "refusal"):
                raise ApiError(
                    f"messages.{index} has a part of type {part.type!r}; only text is served",
                    param=f"messages.{index}.content",
                    code="unsupported_value",
                )
        return "".join(part.text or part.refusal or "" for part in content)
    return content or ""


def _parsed(arguments: str) -> Any:
    """The object that the text is, or the text itself."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _normal(arguments: str) -> str:
    """JSON in one form, so that a client may write it anew; other text as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
