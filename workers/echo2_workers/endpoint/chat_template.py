"""Chat templates, rendered as transformers renders them, without transformers.

The template is that of the model (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`); a model without one gets `PLAIN`. It runs in jinja2's sandbox: it
can read what it is given, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from echo2.errors import ConfigError
from echo2_workers.endpoint.errors import ApiError

if TYPE_CHECKING:
    from jinja2 import Template

PLAIN: Final = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""No template: the contents of the messages one after the other, and nothing between them."""

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """`sources` are the templates by name ("default", and "tool_use" where a model has one);
    `special_tokens` are what a template may name, such as `bos_token`."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources) or {"default": PLAIN}
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Template] = {}
        self.is_plain = not sources

    def speaks_of(self, variable: str) -> bool:
        """Whether the template (the one for tools, if there is one) uses `variable`."""
        return any(variable in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools,
        generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> str:
        """Raises ApiError when the template refuses the messages."""
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "")
        try:
            return template.render(
                **{
                    **self._special_tokens,
                    **arguments,
                    "messages": list(messages),
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                }
            )
        except Exception as error:  # whatever a template of the model's author does
            raise ApiError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _template(self, name: str) -> Template:
        name = name or ("default" if "default" in self._sources else next(iter(self._sources)))
        if name not in self._compiled:
            self._compiled[name] = _compile(self._sources[name])
        return self._compiled[name]


def _compile(source: str) -> Template:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed, and chat templates need it: pip install "
            '"echo2[openai]"'
        ) from error

    class Generation(Extension):
        """{% generation %}: marks the assistant's part; for us it is what stands in it."""

        tags = {"generation"}  # noqa: RUF012  jinja2's way

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template is not valid: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers does: without the HTML escapes of jinja2's own."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(text: str) -> None:
    raise ValueError(text)
