"""How a policy calls tools in plain text: parsed from what it said, and written back.

`HermesTools` is the form that most open models are trained on:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A format of one's own is a class with three small methods; they are pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as the policy wrote it or in a normal form of it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the policy said: `content` beside the calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """`parse` finds calls in what was said. `render` is its inverse, and `describe` tells the
    policy of the tools: both only for a chat template that knows nothing of tools."""

    def parse(self, text: str) -> Parsed: ...
    def render(self, calls: Sequence[ToolCall]) -> str: ...
    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str: ...


class HermesTools:
    """Calls as JSON objects in <tool_call> tags. What is not valid stays in the content."""

    def parse(self, text: str) -> Parsed:
        calls: list[ToolCall] = []

        def take(match: re.Match[str]) -> str:
            call = _call(match[1])
            if call is None:
                return match[0]
            calls.append(call)
            return ""

        content = _CALL.sub(take, text)
        return Parsed(content.strip() if calls else text, tuple(calls))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n'
            "</tool_call>"
            for call in calls
        )

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "You may call functions to assist with the user's query. You are given their "
            f"signatures within <tools></tools> tags:\n<tools>\n{shown}\n</tools>\n"
            "For each call return a JSON object with its name and arguments within "
            '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <name>, "arguments": '
            "<arguments>}\n</tool_call>"
        )


def _call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the JSON as text once more
        return ToolCall(found["name"], arguments)
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False))
